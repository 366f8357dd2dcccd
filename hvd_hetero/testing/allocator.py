"""Environment that keeps the C library's allocator out of measurements."""

from __future__ import annotations

KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment for ranks whose speeds are compared; set it on all of them.

By default the C library returns the memory of large tensors after each step and asks for it again, page by page. The
time for that depends on the batch size in no simple way. Equal networks also differ in pace by where their pages lie;
huge pages reduce that (glibc 2.35 or newer, if the kernel allows them). See ``docs/cpu.md``.
"""
