#!/bin/bash -p
# Brings the files of a Python environment that an attempt has opened close to this node, and starts
# Python there: docs/decisions/019-stage.md. In bash, since each start of a Python asks a slow disk
# hundreds of times.
#
#   stage.sh bring PYTHON NAME    unpacks part NAME of the run's parcel; its code is 0 for success
#   stage.sh run PYTHON WORD...   becomes that Python, or PYTHON itself, with these words
#   stage.sh remove               removes what the job has on this node, unless a task uses it
#   stage.sh tidy                 does so, but for what is hidden
#   stage.sh hide                 hides it, except in memory, for the job's next attempt on the node
#   stage.sh clean                removes what the job has hidden there, and what was left there by
#                                 any job an hour ago or earlier
#
# HPC_DDP_BROUGHT is NAME where all nodes of the attempt have it, no where one has not, empty where
# there is no parcel. Where something is wrong, PYTHON starts from where it is, and one line says so.
set +o posix # of POSIXLY_CORRECT: a redirection that fails would end this shell
action=$1 python=$2
shift $(($# < 2 ? $# : 2))
user_umask=$(umask)
umask 077
here=$(cd "${BASH_SOURCE[0]%/*}" && pwd -P)
run=${here%/lib/hpc_ddp/*}
parcel=$run/stage
key=$(printf %s "$run" | sha256sum)
key=${SLURM_JOB_ID:-0}-${key:0:16} # another job of the run may be on this node
plain='^[A-Za-z0-9/._+@,:=-]+$' # of paths that sed and a link take as they are
places=("${TMPDIR:-/tmp}" /tmp /dev/shm)
mounts=/proc/self/mountinfo
name='' tree='' folder='' why=''

say() { echo "hpc-ddp: ${SLURMD_NODENAME:-$(uname -n)}: $1" >&2; }

# Sets `top` to this user's folder in $1, of mode 0700, on a disk of this node, whose type and free
# bytes are set as well; with a $2 it is made, with the job's folder. No other user can have made it,
# nor put another in its place.
find_top() {
    local owner mode size try
    top=$1/hpc-ddp-near-$EUID
    [[ $top =~ $plain && -d $1 ]] || return
    read -r free size disk < <(stat -f -c '%a %S %T' "$1" 2>/dev/null)
    ((free *= size))
    case $disk in
        ext2/ext3 | xfs | btrfs | zfs | f2fs | tmpfs | ramfs | overlayfs) ;;
        *) return 1 ;; # of a file server, or not known
    esac
    ! is_of_job "$1" || return
    read -r owner mode < <(stat -Lc '%u %a' "$1" 2>/dev/null)
    (((owner == 0 || owner == EUID) && (!(0$mode & 022) || 0$mode & 01000))) || return
    for try in ${2:+1 2 3}; do # another job of the node may remove an empty one in between
        mkdir -m 700 "$top" 2>/dev/null
        is_private && mkdir -p "$top/$key" 2>/dev/null && break
    done
    is_private
}

# Whether $1 lies in a folder that was mounted for this job alone, as by job_container/tmpfs: the
# name of the folder has the job's id. Slurm empties it at a notice already, under the running job,
# and a file that changes its name meanwhile ends all further starts of the job. The /dev/shm of a
# job is no folder of a disk, and goes as a whole.
is_of_job() {
    local path point root mounted='' length=0
    path=$(cd "$1" 2>/dev/null && pwd -P)/
    while read -r _ _ _ root point _; do
        [[ $path == "${point%/}"/* ]] && ((${#point} >= length)) && length=${#point} mounted=$root
    done <"$mounts"
    [[ $mounted/ =~ [^0-9]${SLURM_JOB_ID:-none}[^0-9] ]]
}

# Whether `top` is this user's, and a folder of mode 0700.
is_private() { [[ $(stat -c '%u %f' "$top" 2>/dev/null) == "$EUID 4"?c0 ]]; }

# Sets `folder` to the job's on this node: the one with the tree, else the first with twice the room
# for $1 bytes from which a program can be started. In memory, which an overlay may be as well, they
# may be a quarter of what is free, and of the job's memory, which must be known.
find_folder() {
    local place top free memory
    for place in "${places[@]}"; do
        find_top "$place" && folder=$top/$key &&
            { [ -e "$folder/$name.complete" ] || take_back; } && return
    done
    memory=$((SLURM_MEM_PER_NODE > 0 ? SLURM_MEM_PER_NODE : SLURM_MEM_PER_CPU * SLURM_CPUS_ON_NODE))
    for place in "${places[@]}"; do
        find_top "$place" make || continue
        folder=$top/$key
        if [[ $disk == @(tmpfs|ramfs|overlayfs) ]]; then
            disk=memory
            ((free = (free < memory << 20 ? free : memory << 20) / 2))
        else
            disk=disk
        fi
        ((free > 2 * $1 + (64 << 20))) && can_execute && return
        rmdir "$folder" "$top" 2>/dev/null
    done
    folder='' why='no disk of this node (TMPDIR, /tmp, /dev/shm) has the room, and starts programs'
    for place in "${places[@]}"; do
        ! is_of_job "$place" || { why+="; $place is this job's alone, and emptied at a notice"; break; }
    done
    return 1
}

# Gives the folder that an earlier attempt of the job has hidden its name again, if it has the tree.
take_back() {
    local hidden
    for hidden in "$folder".kept.*; do
        [ -e "$hidden/$name.complete" ] && mv -T "$hidden" "$folder" 2>/dev/null && return
    done
}

# Locks the folder to the end of this process, as all do that use it. systemd-tmpfiles leaves a
# locked folder alone. The one that was locked may have been removed meanwhile.
lock_folder() {
    local try
    for try in 1 2 3; do
        { mkdir -p "$folder" && exec 9<"$folder" && flock -s -w 10 9; } 2>/dev/null &&
            [ "$folder" -ef /proc/self/fd/9 ] && return
    done
    why="$folder can't be locked"
    return 1
}

can_execute() {
    local probe=$folder/.probe-$$ code
    { printf '#!/bin/sh\n' >"$probe" && chmod 700 "$probe" && "$probe"; } 2>/dev/null
    code=$?
    rm -f "$probe"
    return $code
}

# Opens file $1 of the parcel as descriptor 7: it must be this user's alone, and of $2 bytes if given.
open_part() {
    local owner mode size kind
    { exec 7<"$parcel/$1"; } 2>/dev/null || { why="$parcel/$1 can't be read"; return 1; }
    read -r owner mode size kind < <(stat -Lc '%u %a %s %f' /proc/self/fd/7)
    [[ $owner == "$(stat -Lc %u "$run/lib/node.py")" && $kind == 8* ]] && # a regular file
        ((!(0$mode & 022))) && [ "${2:-$size}" = "$size" ] && return
    why="$parcel/$1 is not this user's alone, or not whole"
    return 1
}

# Sets `path` to the absolute path of PYTHON.
find_path() {
    path=$python
    [[ $path == */* ]] || path=$(type -P "$python")
    [[ $path == /* ]] || path=$(pwd -P)/$path
}

# Reads the label of the parcel, whose tree must be $1, and compares the environment with it. A
# PYTHON that the tree can't have, as a wrapper, is found out here, before gigabytes are read.
read_label() {
    local kind first rest path times='' real=''
    local -A programs=() # the folders with Pythons; none in a label of an older hpc-ddp
    parts=() stamps=() spelled=() rewritten=() direct=()
    [ -z "$PYTHONHOME" ] || { why='PYTHONHOME is set'; return 1; }
    open_part label || return
    while read -r kind first rest; do
        case $kind in
            part) parts+=("$first $rest") ;;
            stamp) times+="$first " stamps+=("$rest") ;;
            spelled) spelled+=("$first${rest:+ $rest}") ;;
            real) real+=$first${rest:+ $rest}$'\n' ;;
            rewrite) rewritten+=("$first${rest:+ $rest}") ;;
            direct) direct+=("$first${rest:+ $rest}") ;;
            programs) programs[${first:--}${rest:+ $rest}/]=yes ;; # the first line has no path
        esac
    done <&7
    exec 7<&-
    [[ $(stat -Lc %Y -- "${stamps[@]}" 2>/dev/null | tr '\n' ' ') == "$times" &&
        $(readlink -f -- "${spelled[@]}" 2>/dev/null) == "${real%$'\n'}" ]] ||
        { why='the environment has changed: this attempt notes anew what it opens'; return 1; }
    find_path
    [[ ${#programs[@]} == 0 || ${programs[${path%/*}/]} ||
        ${programs[$(cd "${path%/*}" 2>/dev/null && pwd -P)/]} ]] ||
        { why="$path is not in the parcel (--python may name the Python of a wrapper)"; return 1; }
    read -r name sum size <<<"${parts[0]}"
    read -r caches caches_sum caches_size <<<"${parts[1]}"
    [[ $name == "$1" && $name =~ $plain && $name != */* &&
        $size =~ ^[0-9]+$ && $caches_size =~ ^[0-9]*$ ]] && return
    why="$parcel/label is damaged, or has just changed"
    return 1
}

# Unpacks file $1 of the parcel, with checksum $2 and $3 bytes, as $4, which is not there before all
# of it is verified. The file is read once, and what is wrong with that gets into the checksum.
unpack() {
    local new=$4.new checksum
    open_part "$1" "$3" || return
    rm -rf "$new" "$new".*
    mkdir "$new" || { why="$folder can't be written"; return 1; }
    checksum=$({
        tee /dev/fd/3 <&7 2>/dev/null |
            TAR_OPTIONS='' tar -b 4096 -xPf - -C "$new" --no-same-owner 2>"$new.errors" 3>&-
        [ "${PIPESTATUS[*]}" = '0 0' ] || echo broken >&3
    } 3>&1 >/dev/null | cksum)
    exec 7<&-
    why="the checksum of $parcel/$1 is wrong"
    [ ! -s "$new.errors" ] || why="$parcel/$1 could not be unpacked: $(head -1 "$new.errors")"
    [ "$checksum" = "$2 $3" ] && rm -rf "$4" && mv "$new" "$4" && why=''
    rm -rf "$new" "$new".*
    [ -z "$why" ]
}

# Sets `near` to the path of PYTHON in the tree $1, which must start.
find_near() {
    local path
    find_path
    near=$1$path
    [ -x "$near" ] || near=$1$(cd "${path%/*}" && pwd -P)/${path##*/}
    [ -x "$near" ] || { why="$path is not in the parcel"; return 1; }
    "$near" -I -c '' 2>/dev/null || { why="$near does not start"; return 1; }
}

# Prints the names of all that is in the tree.
list_tree() { (cd "$folder/$name" && find . | LC_ALL=C sort); }

# Whether the tree of an earlier attempt has all that was unpacked: a cleaner takes single files.
is_whole() { [ -z "$(LC_ALL=C comm -23 "$folder/$name.list" <(list_tree) 2>&1)" ]; }

# Unpacks the tree. Its mark comes last; this is the one place that makes it.
unpack_tree() {
    local file
    unpack "$name" "$sum" "$size" "$folder/$name" || return
    for file in "${rewritten[@]}"; do
        sed -i "s|@HPC_DDP_NEAR@|$folder/$name|g" "$folder/$name$file" ||
            { why="$folder/$name$file can't be written"; break; }
    done
    # Python may look for its own library where it was installed, not beside itself.
    cat "${direct[@]}" /dev/null >/dev/null 2>&1
    [ -z "$why" ] && find_near "$folder/$name" && list_tree >"$folder/$name.list" &&
        echo "$disk $((size / 1000000))" >"$folder/$name.complete" && return
    rm -rf "${folder:?}/$name"
    return 1
}

# Unpacks on this node what the parcel has, once for all tasks.
bring() {
    local processor
    read_label "$1" || { [ "${SLURM_PROCID:-0}" = 0 ] || exit 1; return 1; } # said once
    find_folder $((size + caches_size)) && lock_folder || return
    exec 8>>"$folder/unpacking" && flock 8 || return
    { [ -e "$folder/$name.complete" ] && is_whole; } || unpack_tree || return
    # Code that was compiled for one kind of processor may not run on another.
    processor=$(grep -Em2 '^(model name|flags|Features)' /proc/cpuinfo | cksum)
    if [[ $caches == *"-${processor%% *}-"* && ! -e $folder/compile ]]; then
        unpack "$caches" "$caches_sum" "$caches_size" "$folder/compile" ||
            say "$why: the compile caches are cold"
    fi
}

# Turns the variables with folders of the environment to the tree.
use_tree() {
    local variable path paths near_paths
    for variable in PYTHONPATH LD_LIBRARY_PATH; do
        [ "${!variable}" ] || continue
        IFS=: read -ra paths <<<"${!variable}:" # an empty one at the end counts
        near_paths=''
        for path in "${paths[@]}"; do
            [[ $path != /* || ! -d $tree$path ]] || path=$tree$path
            near_paths+=:$path
        done
        export "$variable=${near_paths:1}"
    done
    ! has_user_folder || export PYTHONUSERBASE=${PYTHONUSERBASE-$tree$HOME/.local}
    export HPC_DDP_NEAR=$tree
}

# Whether the tree has all of ~/.local, and so what other Pythons and programs look for there.
has_user_folder() {
    local path
    [ -d "$tree$HOME/.local" ] || return
    for path in "$HOME"/.local/{*,lib/*}; do
        [[ ! -e $path || -e $tree$path ]] || return
    done
}

# Has the Pythons of this task note what they open, and one process of the node keep the parcel.
note_files() {
    mkdir -p "$folder/compile" # by torch it would be of the script's umask
    export HPC_DDP_OPENED_FILES=$folder/opened-$HPC_DDP_ATTEMPT
    export PYTHONPATH=$here/hook${PYTHONPATH:+:$PYTHONPATH} # which has a sitecustomize.py
    export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${TORCHINDUCTOR_CACHE_DIR:-$folder/compile}/triton}
    export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$folder/compile}
    (flock -n 6 && exec nice -n 19 "$program" -E -s "$1" workers.staging.keeper $$) \
        6>>"$folder/keeper-${HPC_DDP_NODE_INDEX:-$SLURM_NODEID}-$(uname -n)" 9<&- & # on a shared disk too
    export HPC_DDP_KEEPER=$! # a child of the supervisor, which ends it
}

# Marks the attempt as one that has used a tree, for its verdict.
mark_attempt() {
    local mark=$HPC_DDP_RUN/logs/attempt-$HPC_DDP_ATTEMPT/staged-$disk
    [ -e "$mark" ] || { : >"$mark"; } 2>/dev/null || { why="$mark can't be written"; return 1; }
}

# Becomes Python for a task, from the tree where there is one.
start() {
    local program=$python disk size
    local mark=$HPC_DDP_RUN/unstaged rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$SLURM_PROCID}}
    local gone="the copy has gone (to try it again: rm $mark)"
    why='there is no parcel yet: this attempt notes what it opens'
    [[ $HPC_DDP_BROUGHT != no && ! -e $mark ]] || remove "$key*"
    [[ ${HPC_DDP_BROUGHT:-no} == no ]] || name=$HPC_DDP_BROUGHT why=$gone
    if [ -e "$mark" ]; then
        why=$(<"$mark")
    elif [[ $name || $4 == supervisor ]] && find_folder 0 && lock_folder; then
        if read -r disk size 2>/dev/null <"$folder/$name.complete" &&
            find_near "$folder/$name" && mark_attempt; then
            tree=$folder/$name program=$near
            use_tree
        fi
        [ "$4" != supervisor ] || note_files "$3"
    fi
    # As where a TaskEpilog empties TMPDIR: each start would read all of the parcel for nothing.
    [[ $tree || $why != "$gone" ]] || { echo "$why" >"$mark"; } 2>/dev/null
    # Where a node has not got it, `bring` has said so.
    if [[ $2 != preflight.checks && ${rank:-0} == 0 && $HPC_DDP_BROUGHT != no ]]; then
        [ -z "$tree" ] || why="$folder has taken $size MB of $disk"
        say "$why; Python starts from ${tree:-where it is}"
    fi
    umask "$user_umask"
    exec "$program" "$@"
}

# Removes folder $1 of a job, or hides it, unless a task uses it. By its new name no task finds it
# meanwhile. Memory is not kept for a next attempt: other jobs of the node would lack it.
remove_folder() {
    local new=$1.$$ keeps=''
    [[ $action != hide || $disk == @(tmpfs|ramfs) ]] || ! compgen -G "$1/*.complete" >/dev/null ||
        { new=$1.kept.$$ keeps=yes; }
    { exec 8<"$1" && flock -n 8 && [ "$1" -ef /proc/self/fd/8 ] && mv "$1" "$new" &&
        { [ "$keeps" ] || rm -rf "$new"; }
    } 2>/dev/null
    exec 8<&-
}

# Removes the folders of the name $1, a pattern, for which find's tests hold.
remove() {
    local place top disk free path
    for place in "${places[@]}"; do
        find_top "$place" || continue
        while read -r path; do
            remove_folder "$path"
        done < <(find "$top" -mindepth 1 -maxdepth 1 -name "$@" 2>/dev/null) # another may have removed it
        rmdir "$top" 2>/dev/null
    done
}

case $action in
    bring) bring "$@" || { say "${why:-$folder fails}; Python starts from where it is" && exit 1; } ;;
    run) start "$@" ;;
    remove) remove "$key*" ;;
    hide | tidy) remove "$key*" ! -name '*.kept.*' ;;
    clean)
        remove "$key.*"
        remove '*' -mmin +60
        ;;
esac
