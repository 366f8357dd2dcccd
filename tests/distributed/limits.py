"""How long a launched job may take: several times what it does on a busy machine, for only a hang should end one.

A job whose ranks wait for each other for good uses no processor meanwhile, so that a long limit costs patience alone.
"""

TORCH_S = 300.0
KERAS_S = 500.0  # TensorFlow takes long to import, and traces its functions
DEMO_S = 500.0  # of the whole program, which launches one job
