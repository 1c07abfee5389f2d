"""Print the path of this interpreter's shared library; an empty line where it has none."""

import sys
import sysconfig
from pathlib import Path

values = sysconfig.get_config_vars()
folders = [values.get("LIBDIR"), values.get("LIBPL"), f"{sys.base_prefix}/lib"]
if values.get("MULTIARCH") and values.get("LIBDIR"):
    folders.insert(1, f"{values['LIBDIR']}/{values['MULTIARCH']}")
names = [values.get("INSTSONAME"), values.get("LDLIBRARY")]
paths = [Path(f, n) for n in names if n and ".so" in n for f in folders if f]
print(next((path for path in paths if path.is_file()), ""))
