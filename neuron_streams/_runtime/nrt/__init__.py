"""libnrt, the Neuron runtime, through ctypes: the port on its asynchronous calls.

    status.py    what a status of libnrt means, and the exceptions
    structs.py   the structs, as ctypes
    lib.py       finding and loading libnrt, its three asynchronous ABIs told apart
    memory.py    device memory: nrt tensors under a caching allocator, and Buffers on them
    model.py     a NEFF, loaded
    weights.py   the tensors that executables share
    sets.py      tensor sets, used again
    requests.py  commands as requests of the hardware's queues
    queue.py     one queue of an execution unit: what is in flight on it
    notice.py    how completion is noticed: eventfds, polling or handles
    order.py     which command may be given to which queue, and when
    progress.py  giving commands to queues, and ending them as they complete
    survey.py    what of the Neuron stack is on this machine
    runtime.py   the runtime: its thread, memory and end

Proved against a test double of libnrt; none of it has run on a Neuron device yet.
"""
