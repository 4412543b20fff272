"""trtllm-gen without its GPU: the library's Python layer as installed, its compiled launcher emulated.

The three ``trtllm-gen`` routes run on CPU tensors through FlashInfer itself; only the compiled module is
replaced. What stands in for it computes attention from exactly the arguments that the C++ launcher would get
and derives what that one derives: raw addresses, K's strides for V too, page ids read from the table without
a bound. In guarded memory a wrong page table is then a real fault, a wrong scale a wrong number, and the
checks judge them as they judge any route.

What this shows is that the metadata are right: lengths, offsets, tables, scales, strides, counters. It says
nothing about the kernels: not their speed, their rounding, what they prefetch, or whether a cubin exists.

- ``arguments``: the launcher's positional arguments by name, for the versions known
- ``params``: what the launcher derives of them, and the checks that it makes before a launch
- ``memory``: reads and writes at addresses
- ``launcher``: the computation
- ``route``: the routes, named ``emulated-...``; ``registry`` offers them to nobody
- ``planted``: the same with one mistake each in what an engine hands over
"""
