"""What is kept on disk between processes, in the cache directory (``LAZYXLA_CACHE_DIR``).

===================  =============================================================================
``program_store.py``  compiled programs: what is kept of a graph, and what it is found by
``entries.py``        the directory of their entries, which many processes share
``environment.py``    what programs depend on besides their graph, and how two environments differ
``kernel_table.py``   which work programs leave to PyTorch's kernels, as measured on this machine
``shape_store.py``    PyTorch's answers about shapes
``files.py``          which directories and files may be used
===================  =============================================================================

C++ asks on a miss only (csrc/program/program_store.h, csrc/dispatch/inference_store.h).
"""
