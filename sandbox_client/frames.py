"""The words between the server, the zygote and its children. Apart from all three, for each imports only what it is."""

import struct

# server <-> child: a kind, two lengths, JSON, raw bytes
FRAME = struct.Struct("!cII")
OPEN, CALL, EXEC, WRITE, READ, BRANCH, UNPACK = b"o", b"c", b"x", b"w", b"g", b"b", b"u"
READY, FAILED, REPLY = b"y", b"n", b"r"
TEXT_MAX = 64 << 10  # of a value's repr and of an error

# server -> zygote: a kind and a child's number, for a copy also the original's number and the copy's pid
REQUEST = struct.Struct("!cIII")
# zygote -> server: exited or adopted, number, wait status (-1: not known), what else is known of its death
EXIT = struct.Struct("!cIiB")
FORK, KILL, BURY, EXITED = b"f", b"k", b"b", b"x"  # bury: it has hung up; kill it if it is not dead already
NOTHING, OUT_OF_MEMORY, FROM_OUTSIDE = 0, 1, 2  # killed, and by nothing that a program there could have done
FORK_STEM, ADOPT, ADOPTED = b"F", b"a", b"a"  # a stem is a child that may be copied
