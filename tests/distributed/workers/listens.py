"""A rank that says where its launcher listens for it, and waits until the file exists that its argument names."""

import os
import sys
import time

print(os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"], os.getpid())
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
