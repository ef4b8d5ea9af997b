"""The way by which the preflight's task of a node passes the dialogue on to torchrun's agent.

Both belong to steps of Slurm's of their own. The task passes its stdin and stdout, and the socket
for the store, over a local socket that has a name, and no file.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import sys
import time

from hpc_ddp.core.file_io import patiently
from hpc_ddp.node.net.place import Place

LOOK_EVERY_S = 0.1  # for the preflight's task, while it is not there


def _name(place: Place) -> str:
    """Return the name of the node's socket, one of Linux's abstract names. By the attempt's secret:
    another user of the node could take a name that can be guessed. Raise OSError where the secret
    can't be read."""
    secret = patiently(place.attempt.secret.read_bytes)
    return f"\0hpc-ddp-{hmac.new(secret, place.node.encode(), 'sha256').hexdigest()[:32]}"


def _is_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a local connection is this user's."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("iII", credentials)  # process, user, group
    return bool(user == os.geteuid())


def pass_dialogue(place: Place, store_socket: socket.socket) -> None:
    """Wait until a process of this node calls `take_dialogue`, pass this process's stdin and stdout
    and the `store_socket` to it, and return once it has ended. Raise OSError as `_name`, and where
    another process has the socket's name."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_name(place))
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                if _is_this_user(connection):
                    files = [sys.stdin.fileno(), sys.stdout.fileno(), store_socket.fileno()]
                    socket.send_fds(connection, [b"\n"], files)
                    connection.recv(1)  # until the fork's end
                    return


def take_dialogue(place: Place) -> tuple[socket.socket, socket.socket]:
    """Wait until a process of this node calls `pass_dialogue`. Make its stdin and stdout those of
    this process, and return the connection to it, which has to stay open until the dialogue's end,
    and the socket for the store. Raise OSError as `_name`."""
    name = _name(place)
    while True:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(name)
            _, files, _, _ = socket.recv_fds(connection, 1, 3)
        except OSError:  # no task yet, or none any more
            files = []
        if len(files) == 3 and _is_this_user(connection):
            break
        for file in files:
            os.close(file)
        connection.close()
        time.sleep(LOOK_EVERY_S)
    os.dup2(files[0], 0)
    os.dup2(files[1], 1)
    sys.stdin = os.fdopen(0, closefd=False)
    return connection, socket.socket(fileno=files[2])
