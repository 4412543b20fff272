"""What compute-sanitizer prints, by version and kind of access: NVIDIA's manual and public reports, cut."""

from __future__ import annotations

BANNER = "========= COMPUTE-SANITIZER\n"
AFTER = (
    BANNER
    + """\
========= Invalid __global__ read of size 4 bytes
=========     at kernel_mha(unsigned int, const int *, float)+0x1a80 in mha_sm90.cu:418
=========     by thread (96,0,0) in block (3906,0,1)
=========     Access to 0x79fd33fd0980 is out of bounds
=========     and is 129 bytes after the nearest allocation at 0x79fd33c00000 of size 4,000,000 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: main in add.cu:25 [0x8a81] in add
=========
========= Invalid __global__ read of size 4 bytes
=========     at kernel_mha(unsigned int, const int *, float)+0x1a80 in mha_sm90.cu:418
=========     by thread (97,0,0) in block (3906,0,1)
=========     Access to 0x79fd33fd0984 is out of bounds
=========     and is 133 bytes after the nearest allocation at 0x79fd33c00000 of size 4,000,000 bytes
=========
unknown: illegal_access reference CUDA error: an illegal memory access was encountered
========= Error: process didn't terminate successfully
========= Target application returned an error
========= ERROR SUMMARY: 96 errors
========= ERROR SUMMARY: 86 errors were not printed. Use --print-limit option to adjust
"""
)
BEFORE = (
    BANNER
    + """\
========= Invalid __global__ atomic of size 4 bytes
=========     at acme::count<(int)128, (bool)1>(T1 *, int)+0x50
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0xf02a3c3d43fc is out of bounds
=========     and is 4 bytes before the nearest allocation at 0xf02a3c3d4400 of size 2048 bytes
=========
========= ERROR SUMMARY: 1 error
"""
)
MISALIGNED = (
    BANNER
    + """\
========= Invalid __global__ write of size 4 bytes
=========     at unaligned_kernel():0x160 in memcheck_demo.cu:6
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x710fdca00001 is misaligned
=========     and is inside the nearest allocation at 0x710fdca00000 of size 4 bytes
=========
========= ERROR SUMMARY: 1 error
"""
)
# the inlined function first, the kernel as its last device frame; a locale that writes 1.536 for 1536
INLINED = (
    BANNER
    + """\
========= Invalid __global__ read of size 16 bytes
=========     at load_tile(const uint4 *)+0xb0 in tile.cuh:39
=========     by thread (32,0,0) in block (453,0,0)
=========     Access to 0x1001c3ecc00 is out of bounds
=========     and is 1.536 bytes before the nearest allocation at 0x1001c3ed200 of size 1.024 bytes
=========         Device Frame: middle(int)+0x30 in tile.cuh:44
=========         Device Frame: void flash::fwd_kernel<flash::Traits<(int)128>>(flash::Params)+0x12c0
=========
========= ERROR SUMMARY: 2752 errors
"""
)
# 2021: the offset first, the source before the name, no allocation
OLD = (
    BANNER
    + """\
========= Invalid __shared__ read of size 8 bytes
=========     at 0x3b0 in /src/my_helper.cuh:75:void vector_projection<double>(double*, int)
=========     by thread (251,0,0) in block (0,0,0)
=========     Address 0x964000008 is out of bounds
=========
"""
)
CLEAN = BANNER + "torch-splitkv: safe\n========= ERROR SUMMARY: 0 errors\n"
UNSUPPORTED = (
    BANNER
    + """\
========= Error: Device not supported. Please refer to the "Supported Devices" section of the sanitizer \
documentation
=========
CUDA error: unknown error
========= Error: process didn't terminate successfully
========= ERROR SUMMARY: 1 error
"""
)
# what the pip wheel, which lacks its launcher, says of every program
NO_LAUNCH = (
    BANNER
    + """\
========= Error: Target application terminated before first instrumented API call
========= Error: couldn't find exit code.
"""
)
