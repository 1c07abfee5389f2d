"""Print the path of this interpreter's shared library; an empty line where it has none."""

import os
import sys
import sysconfig

values = sysconfig.get_config_vars()
folders = [values.get("LIBDIR"), values.get("LIBPL"), os.path.join(sys.base_prefix, "lib")]
if values.get("MULTIARCH") and values.get("LIBDIR"):
    folders.insert(1, os.path.join(values["LIBDIR"], values["MULTIARCH"]))
names = [values.get("INSTSONAME"), values.get("LDLIBRARY")]
paths = [os.path.join(f, n) for n in names if n and ".so" in n for f in folders if f]
print(next((path for path in paths if os.path.isfile(path)), ""))
