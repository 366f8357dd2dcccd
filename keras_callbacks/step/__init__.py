"""A round inside the train step of Keras."""
