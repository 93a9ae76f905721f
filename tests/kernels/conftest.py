"""Triton's interpreter finds the functions of its language and numpy's dtypes once.

In each call within a kernel it replaces those functions, and searches all names of the language for
them: a sixth of the time that an interpreted kernel takes. For each tensor it makes a table of the
dtypes: a twelfth.
"""

import inspect
from functools import cache

from devices import INTERPRETED

if INTERPRETED:
    from triton.language.core import block_type, is_builtin, pointer_type
    from triton.runtime import interpreter

    @cache
    def _builtins(part):
        return [name for name, member in inspect.getmembers(part) if is_builtin(member)]

    def _patch_builtin(part, builder, scope):
        for name in _builtins(part):
            member = getattr(part, name)
            if is_builtin(member):
                interpreter._patch_attr(part, name, member, builder, scope)

    _made = interpreter._get_np_dtype
    _made_once = cache(_made)

    def _get_np_dtype(dtype):
        entry = dtype.element_ty if isinstance(dtype, block_type) else dtype
        # Those of pointers have no hash.
        return _made(entry) if isinstance(entry, pointer_type) else _made_once(entry)

    _patch = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        _patch(tensor, scope)
        # An older Triton leaves it to numpy to make an array of one entry a number.
        scope.set_attr(tensor, "__index__", lambda x: int(x.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _get_np_dtype
