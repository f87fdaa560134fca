"""The asynchronous NEFF runtime: one port, several implementations. Private.

port.py       what a runtime must and may not do: tickets, units, commands, the protocol
manual.py     no threads, the caller decides which lane steps: the specification
emulated.py   a CPU plays the device, on the threads of the native worker (worker/, in C)
nrt/          libnrt, through ctypes
lanes.py      lanes kept in Python, for manual and nrt
process.py    the one runtime of the process
extension.py  the C++ extension, built at first use with what toolchain.py finds
program.py    a compiled program, as data; chain.py and chain.c run it, exported.py the rest
cache.py      the folder where what was built is kept; ownership.py, whether it can be trusted
"""
