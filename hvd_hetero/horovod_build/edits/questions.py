"""Edits by which ``horovodrun`` learns what Horovod was built with, without importing a framework."""

from hvd_hetero.horovod_build.edits.edit import Edit

__all__ = ["QUESTION_EDITS"]

QUESTION_EDITS = (
    Edit(
        "horovod/common/util.py",
        "def extension_available(",
        '''def _has_class(ext_base_name, class_name, fn_desc, verbose):
    """
    Looks for the name of a C++ class in the extension's file: run-time type information keeps it, stripped or not.
    Returns None if the extension was not built. Imports nothing, which for a framework would take seconds.
    """
    import glob
    import mmap

    if verbose:
        print('Checking whether extension {ext_base_name} was {fn_desc}.'.format(
            ext_base_name=ext_base_name, fn_desc=fn_desc))
    package = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), ext_base_name)
    files = glob.glob(os.path.join(glob.escape(package), 'mpi_lib*' + get_ext_suffix()))
    result = None
    for path in files:
        with open(path, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            mangled = '{}{}'.format(len(class_name), class_name).encode()
            result = bool(result) or content.find(mangled) != -1
    if verbose:
        print('Extension {ext_base_name} {flag} {fn_desc}.'.format(
            ext_base_name=ext_base_name, flag=('was' if result else 'was NOT'),
            fn_desc=fn_desc))
    return result


def extension_available(''',
        "the launcher must not import a framework to learn what Horovod was built with",
    ),
    *(
        Edit(
            "horovod/common/util.py",
            f"""built_fn = lambda ext: ext.{name}_built()
        result = _check_extension_lambda(
            ext_base_name, built_fn, 'built with {title}', verbose)""",
            f"result = _has_class(ext_base_name, '{title}Controller', 'built with {title}', verbose)",
            "the launcher asks this twice or more for every job, each time importing TensorFlow",
        )
        for name, title in (("mpi", "MPI"), ("gloo", "Gloo"))
    ),
)
