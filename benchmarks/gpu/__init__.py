"""One command for a bare GPU machine; see __main__.py."""

import os

# Phases run in forked children, which find no GPU if their parent asked CUDA for one; asked this way it stays usable.
# Read when torch is imported, or transformers, which may look whether there is a GPU.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
