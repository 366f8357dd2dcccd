"""hvd-hetero: data-parallel training at the pace of all ranks, not of the slowest.

The core is framework-neutral: it takes measurements in and gives decisions out, and imports neither Horovod nor a
deep-learning framework. ``torch_hooks`` and ``keras_callbacks`` connect it to PyTorch and to Keras.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
