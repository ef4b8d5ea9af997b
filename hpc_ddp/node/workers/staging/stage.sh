#!/bin/bash
# Brings the files of a Python environment that an attempt has opened close to this node, and starts
# Python there: docs/decisions/019-stage.md. In bash, since each start of a Python asks a slow disk
# hundreds of times.
#
#   stage.sh bring PYTHON         unpacks the run's parcel on this node
#   stage.sh where PYTHON         prints the path of PYTHON in the unpacked tree; nothing without one
#   stage.sh run PYTHON WORD...   becomes that Python, or PYTHON itself, with these words
#   stage.sh remove               removes what the run has on this node, unless a task uses it
#
# Where something is wrong, PYTHON starts from where it is, after one line that says why.
action=$1 python=$2
shift $(($# < 2 ? $# : 2))
user_umask=$(umask)
umask 077
here=$(cd "${BASH_SOURCE[0]%/*}" && pwd -P)
run=${here%/lib/hpc_ddp/*}
parcel=$run/stage
key=$(printf %s "$run" | sha256sum)
key=${key:0:16}
plain='^[A-Za-z0-9/._+@,:=-]+$' # of paths that sed and a link take as they are
places=("${TMPDIR:-/tmp}" /tmp /dev/shm)
name=none tree='' folder='' why=''

say() { echo "hpc-ddp: ${SLURMD_NODENAME:-$(uname -n)}: $1" >&2; }

# Sets `top` to this user's folder in $1, of mode 0700, on a disk of this node, whose type and free
# bytes are set as well; with a $2 it is made. No other user can have made it, nor put another in
# its place.
find_top() {
    local owner mode size
    top=$1/hpc-ddp-near-$EUID
    [[ $top =~ $plain && -d $1 ]] || return
    read -r disk free size < <(stat -f -c '%T %a %S' "$1")
    ((free *= size))
    case $disk in
        ext2/ext3 | xfs | btrfs | zfs | f2fs | tmpfs | ramfs | overlayfs) ;;
        *) return 1 ;; # of a file server, or not known
    esac
    read -r owner mode < <(stat -Lc '%u %a' "$1")
    (((owner == 0 || owner == EUID) && (!(0$mode & 022) || 0$mode & 01000))) || return
    [ -z "$2" ] || mkdir -m 700 "$top" 2>/dev/null
    [ "$(stat -c '%u %a %F' "$top" 2>/dev/null)" = "$EUID 700 directory" ]
}

# Sets `folder` to the run's on this node: the one with the tree, else the first with room for $1
# bytes from which a program can be started. A disk in memory may take a third of the job's.
find_folder() {
    local place top disk free memory
    for place in "${places[@]}"; do
        find_top "$place" && folder=$top/$key && [ -e "$folder/$name.complete" ] && return
    done
    for place in "${places[@]}"; do
        find_top "$place" make || continue
        folder=$top/$key in_memory=no
        if [[ $disk == @(tmpfs|ramfs) ]]; then
            in_memory=yes
            memory=$(awk '/^MemAvailable/ { printf "%d", $2 * 1024 }' /proc/meminfo)
            ((SLURM_MEM_PER_NODE > 0 && SLURM_MEM_PER_NODE << 20 < memory)) &&
                memory=$((SLURM_MEM_PER_NODE << 20))
            ((free = free < memory / 3 ? free : memory / 3))
        fi
        ((free > $1 * 11 / 10 + (64 << 20))) && mkdir -p "$folder" && can_execute && return
        rmdir "$folder" "$top" 2>/dev/null
    done
    folder='' why='no disk of this node (TMPDIR, /tmp, /dev/shm) has the room, and starts programs'
    return 1
}

can_execute() {
    local probe=$folder/.probe-$$ code
    { printf '#!/bin/sh\n' >"$probe" && chmod 700 "$probe" && "$probe"; } 2>/dev/null
    code=$?
    rm -f "$probe"
    return $code
}

# Opens file $1 of the parcel as descriptor 7: it must be this user's alone, and of $2 bytes, if given.
open_part() {
    local owner mode size kind
    { exec 7<"$parcel/$1"; } 2>/dev/null || { why="$parcel/$1 can't be read"; return 1; }
    read -r owner mode size kind < <(stat -Lc '%u %a %s %F' /proc/self/fd/7)
    [[ $owner == "$(stat -Lc %u "$run/lib/node.py")" && $kind == regular* ]] &&
        ((!(0$mode & 022))) && [ "${2:-$size}" = "$size" ] && return
    why="$parcel/$1 is not this user's alone, or not whole"
    return 1
}

# Reads the label of the parcel: the parts, and the times by which the environment is as it was.
read_label() {
    local kind first rest times=''
    parts=() stamps=() rewritten=() direct=()
    [ -e "$parcel/label" ] || { why='there is no parcel yet: this attempt notes what it opens'; return 1; }
    open_part label || return
    while read -r kind first rest; do
        case $kind in
            part) parts+=("$first $rest") ;;
            stamp) times+="$first " stamps+=("$rest") ;;
            rewrite) rewritten+=("$first${rest:+ $rest}") ;;
            direct) direct+=("$first${rest:+ $rest}") ;;
        esac
    done <&7
    exec 7<&-
    [ "$(stat -Lc %Y -- "${stamps[@]}" 2>/dev/null | tr '\n' ' ')" = "$times" ] ||
        { why='the environment has changed: this attempt notes anew what it opens'; return 1; }
    read -r name sum size <<<"${parts[0]}"
    [[ $name =~ $plain && $name != */* && $size =~ ^[0-9]+$ ]] && return
    name=none why="$parcel/label is damaged"
    return 1
}

# Unpacks file $1 of the parcel, with checksum $2 and $3 bytes, as $4, which is not there before all
# of it is verified. The file is read once.
unpack() {
    local new=$4.new states
    open_part "$1" "$3" || return
    rm -rf "$new" "$new".*
    mkdir "$new" && mkfifo "$new.pipe" || { why="$folder can't be written"; return 1; }
    cksum <"$new.pipe" >"$new.sum" &
    tee "$new.pipe" <&7 2>/dev/null | tar -b 4096 -xPf - -C "$new" --no-same-owner 2>"$new.errors"
    states=${PIPESTATUS[*]}
    wait $!
    exec 7<&-
    why="$parcel/$1 could not be unpacked: $(head -1 "$new.errors")"
    if [ "$states" = '0 0' ]; then
        why="the checksum of $parcel/$1 is wrong"
        [ "$(<"$new.sum")" = "$2 $3" ] && rm -rf "$4" && mv "$new" "$4" && why=''
    fi
    rm -rf "$new" "$new".*
    [ -z "$why" ]
}

# Sets `near` to the path of PYTHON in the tree $1.
find_near() {
    local path=$python
    [[ $path == */* ]] || path=$(type -P "$python")
    [[ $path == /* ]] || path=$PWD/$path
    near=$1$path
    [ -x "$near" ] || near=$1$(cd "${path%/*}" && pwd -P)/${path##*/}
    [ -x "$near" ] || { why="$path is not in the parcel"; return 1; }
}

# Unpacks the tree. Its mark comes last; this is the one place that makes it.
unpack_tree() {
    local file
    unpack "$name" "$sum" "$size" "$folder/$name" || return
    for file in "${rewritten[@]}"; do
        sed -i "s|@HPC_DDP_NEAR@|$folder/$name|g" "$folder/$name$file"
    done
    # Python may look for its own library where it was installed, not beside itself.
    cat "${direct[@]}" /dev/null >/dev/null 2>&1
    if ! { find_near "$folder/$name" && "$near" -I -c '' 2>/dev/null; }; then
        why=${why:-"$near does not start"}
        rm -rf "${folder:?}/$name"
        return 1
    fi
    echo "$in_memory" >"$folder/$name.complete"
}

# Unpacks on this node what the parcel has, once for all tasks.
bring() {
    local caches processor caches_sum caches_size
    read_label && find_folder "$size" || return
    exec 8>>"$folder/unpacking" && flock 8 || return
    printf %s "$run" >"$folder/run"
    rm -f "$folder/$name.refused"
    if [ ! -e "$folder/$name.complete" ]; then
        remove_other_trees
        unpack_tree || printf %s "$why" >"$folder/$name.refused"
    fi
    processor=$(grep -m1 'model name' /proc/cpuinfo | cksum)
    read -r caches caches_sum caches_size <<<"${parts[1]}"
    # Code that was compiled for one kind of processor may not run on another.
    if [[ $caches == *"-${processor%% *}-"* && ! -e $folder/compile ]]; then
        unpack "$caches" "$caches_sum" "$caches_size" "$folder/compile" ||
            say "$why: the compile caches are cold"
    fi
    exec 8>&-
}

# Removes the trees of other parcels of this run, unless a task of another job uses one.
remove_other_trees() {
    exec 9>>"$folder/used"
    flock -n 9 && find "$folder" -mindepth 1 -maxdepth 1 -name 'environment-*' -exec rm -rf {} +
    exec 9>&-
}

# Turns the variables with folders of the environment to the tree.
use_tree() {
    local variable path paths near_paths
    for variable in PYTHONPATH LD_LIBRARY_PATH; do
        [ "${!variable}" ] || continue
        IFS=: read -ra paths <<<"${!variable}"
        near_paths=''
        for path in "${paths[@]}"; do
            [[ $path != /* || ! -d $tree$path ]] || path=$tree$path
            near_paths+=:$path
        done
        export "$variable=${near_paths:1}"
    done
    [ ! -d "$tree$HOME/.local" ] || export PYTHONUSERBASE=${PYTHONUSERBASE-$tree$HOME/.local}
    export HPC_DDP_NEAR=$tree
}

# Has the Pythons of this task note what they open, and one process of the node keep the parcel.
note_files() {
    export HPC_DDP_OPENED_FILES=$folder/opened-${HPC_DDP_RUN##*/}-$HPC_DDP_ATTEMPT
    export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} # which has a sitecustomize.py
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TORCHINDUCTOR_CACHE_DIR:-$folder/compile}/triton}
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$folder/compile}
    (flock -n 6 && exec nice -n 19 "$near" -E -s "$1" workers.staging.keeper $$) \
        6>>"$folder/keeper-${HPC_DDP_NODE_INDEX:-${SLURM_NODEID:-0}}" &
}

# Becomes Python for a task, from the tree where there is one. A task has `used` locked to its end.
start() {
    local is_of_run='' place='of a disk, and none of the memory of the job'
    near=$python
    if read_label; then
        find_folder "$size" && [ ! -e "$folder/$name.complete" ] && [ ! -e "$folder/$name.refused" ] && bring
        [ -z "$folder" ] || [ ! -e "$folder/$name.refused" ] || why=$(<"$folder/$name.refused")
    else
        is_of_run=yes
        find_folder 0
    fi
    if [ "$folder" ] && printf %s "$run" >"$folder/run" && exec 9>>"$folder/used" && flock -s 9; then
        if [ -e "$folder/$name.complete" ] && find_near "$folder/$name"; then
            tree=$folder/$name
            use_tree
        else
            near=$python
        fi
        [ "$4" != supervisor ] || note_files "$3"
    fi
    # What is so for the whole run is said once.
    if [ "$tree" ] && [ "${SLURM_PROCID:-0}" = 0 ]; then
        [ "$(<"$tree.complete")" = no ] || place='of the memory of the job'
        say "Python starts from $folder, which has taken $((size / 1000000)) MB $place"
    elif [ -z "$tree" ] && [ -z "$is_of_run" -o "${SLURM_PROCID:-0}" = 0 ]; then
        say "$why; Python starts from where it is"
    fi
    umask "$user_umask"
    exec "$near" "$@"
}

remove() {
    local place top disk free
    for place in "${places[@]}"; do
        find_top "$place" || continue
        if [ -d "$top/$key" ]; then
            { exec 9>>"$top/$key/used" && flock -w 5 9 && rm -rf "${top:?}/$key"; } 2>/dev/null
            exec 9>&-
        fi
        rmdir "$top" 2>/dev/null
    done
}

case $action in
    bring) bring ;;
    where) read_label && find_folder "$size" && [ -e "$folder/$name.complete" ] &&
        find_near "$folder/$name" && echo "$near" ;;
    run) start "$@" ;;
    remove) remove ;;
esac
