"""Builds FlashInfer's modules ahead of time, on a machine without a GPU.

A run on an offline GPU host finds every module that it will ask for in a folder laid out as FlashInfer's
``data/aot`` (``<name>/<name>.so``) and needs no compiler there. The library names the modules: each route
is opened, prepared and run on a tiny step with compiled code replaced, and what it asks to load is the list.
"""
