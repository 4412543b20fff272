"""FlashInfer's attention kernels behind the ``Route`` protocol, one file a kernel family.

What all of them keep:

- FlashInfer is imported when a session is opened, never before: a parent that forks children must not
  have imported it.
- Every buffer comes from the caller's ``allocate``; wrappers are opened with ``use_cuda_graph=True``,
  since graph mode is another program (other tile sizes, another plan).
- A captured graph keeps addresses, so a session owns its metadata buffers and ``prepare`` copies a step's
  lengths and page table into them. q, out and the KV pool stay the step's own.
- What is launched is data first: a pure function turns a step into a :class:`~.call.Call`, which tests
  bind to the library's real signature without a GPU.

Contracts are from flashinfer-python 0.6.18.post1 and 0.7.2; the calls are the same in both.
"""
