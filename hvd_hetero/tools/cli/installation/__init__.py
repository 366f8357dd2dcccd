"""Facts that ``hvd-hetero check`` reads (`facts`, `horovod`, `two_ranks`), and its judgement of them (`findings`)."""
