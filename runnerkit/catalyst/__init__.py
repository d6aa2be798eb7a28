"""Names for programs of Catalyst 21.12 that are not ported yet: ``from runnerkit.catalyst import dl``.

`dl` has runners that also write Catalyst's files; `contrib`, `registry` and `settings` hold what a ported program
leaves out. Catalyst's other modules are those of `runnerkit`: docs/migration/catalyst.md has the table.
"""

from __future__ import annotations

from runnerkit.support.stub_names import names_of_stub

__getattr__, __dir__, __all__ = names_of_stub(__name__)
