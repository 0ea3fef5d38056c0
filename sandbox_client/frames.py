"""The words between the server, the zygote and its children. Apart from all three, for each imports only what it is."""

import struct

# server <-> child: a kind, two lengths, JSON, raw bytes
FRAME = struct.Struct("!cII")
OPEN, CALL, EXEC, WRITE, READ = b"o", b"c", b"x", b"w", b"g"
READY, FAILED, REPLY = b"y", b"n", b"r"
TEXT_MAX = 64 << 10  # of a value's repr and of an error

# server -> zygote: a kind and a child's number; zygote -> server: exited, number, wait status, out of memory
REQUEST = struct.Struct("!cI")
EXIT = struct.Struct("!cIiB")
FORK, KILL, BURY, EXITED = b"f", b"k", b"b", b"x"  # bury: it has hung up; kill it if it is not dead already
