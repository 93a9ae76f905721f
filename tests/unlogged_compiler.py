"""Compiling without work that only torch's log shows, and with torch's rules looked up once.

After each compilation torch empties the processor's caches and times the guards once: 17 ms, half
of what a small function takes to compile, in each of the thousands that the tests compile. It
writes each graph as text, and tokenizes each file that it traces for the names of functions. With
each world it forgets its rules for tracing, as some modules might not have been imported when they
were looked up: 15 ms, and here they have been.
"""

import torch._dynamo.guards as guards
import torch._dynamo.symbolic_convert as symbolic_convert
import torch._dynamo.trace_rules as trace_rules
import torch._functorch._aot_autograd.graph_compile as graph_compile


def _instead(module, name, value):
    """Other versions of torch may not have it."""
    if hasattr(module, name):
        setattr(module, name, lambda *_: value)


_instead(guards, "profile_guard_manager", 0.0)
_instead(graph_compile, "_log_joint_graph", None)
_instead(graph_compile, "_log_fw_bw_graphs", (None, None))
_instead(symbolic_convert, "get_funcname", None)
trace_rules.clear_lru_cache()
_instead(trace_rules, "clear_lru_cache", None)
