"""What ``hvd-hetero check`` reads (`facts`, `horovod`, `two_ranks`), and what it makes of it (`findings`)."""
