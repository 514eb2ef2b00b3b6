"""Pack the folder build."""

import shutil

shutil.make_archive("page", "zip", "build")
