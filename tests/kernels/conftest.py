"""Triton's interpreter does without what takes more than a third of its time and changes nothing.

Before each function that a kernel calls it replaces the functions of its language anew. With each
sum of integers it computes whether they overflow, which only a debug build reports. For each tensor
it makes a table of numpy's dtypes.
"""

from functools import cache

from devices import INTERPRETED

if INTERPRETED:
    import triton.language as tl
    from triton.language.core import block_type, is_builtin, pointer_type
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang

    @cache
    def _languages(fn):
        return [lang for lang in (tl, tl.core) if any(v is lang for v in fn.__globals__.values())]

    def _patch_lang(fn):
        if any(is_builtin(lang.load) for lang in _languages(fn)):
            return _patch(fn)
        return interpreter._LangPatchScope()  # its caller has replaced them

    _made = interpreter._get_np_dtype
    _made_once = cache(_made)

    def _get_np_dtype(dtype):
        entry = dtype.element_ty if isinstance(dtype, block_type) else dtype
        # Those of pointers have no hash.
        return _made(entry) if isinstance(entry, pointer_type) else _made_once(entry)

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor, scope):
        _patch_tensor(tensor, scope)
        # An older Triton leaves it to numpy to make an array of one entry a number.
        scope.set_attr(tensor, "__index__", lambda x: int(x.handle.data.item()))

    interpreter._patch_lang = _patch_lang
    interpreter._patch_lang_tensor = _patch_lang_tensor
    interpreter._get_np_dtype = _get_np_dtype
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
