"""Configurations, launchers, the command line, and what a run reports.

The top layer: it may import ``crossdock.experts``, ``crossdock.dispatch`` and
``crossdock.scratch``; nothing below imports it.

    YAML -> config -> join (or start) the ranks -> batch and routing -> run -> report
"""
