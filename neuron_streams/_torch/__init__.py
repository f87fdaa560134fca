"""All that is done to torch: the device below Python (csrc), and process groups over it.

csrc/           the C++ extension
c10d/           the C++ backend of process groups, a library of its own
before_use.py   what torch asks before the first use
distributed.py  process groups take device tensors
dynamo.py       torch.compile stays out of this package and drops no stream
dlpack.py       other libraries of the process do
printing.py     what a tensor shows where the host does not reach its memory
"""
