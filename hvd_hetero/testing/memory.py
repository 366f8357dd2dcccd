"""What keeps the C library's allocator out of measurements."""

from __future__ import annotations

__all__ = ["KEEP_MEMORY"]

KEEP_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": "1000000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment of ranks that are to be compared, all of them alike.

By default the C library hands the memory of large tensors back after each step and asks for it again, page by page:
time that depends on the batch size in no simple way. And equal networks of one process differ in pace by where their
pages came to lie, which matters less on huge ones (glibc 2.35 or newer, where the kernel allows them). See
``docs/cpu.md``.
"""
