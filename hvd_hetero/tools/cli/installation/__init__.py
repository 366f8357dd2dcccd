"""What ``hvd-hetero check`` reads (`facts`, `horovod_facts`, `two_ranks`), and what it makes of it (`findings`)."""
