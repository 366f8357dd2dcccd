"""Tools for use before and after a training. They import the runtime, which never imports them."""
