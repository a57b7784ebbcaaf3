"""Target ``made_up``: the first tokens of made_up's room."""

from .patch import Patch, Site


class MadeUpPatch(Patch):
    """Keeps sinks in what ``kept`` returns."""

    def sites(self, module):
        return [Site(module, "kept", self._kept)]

    def _kept(self, policy, upstream, tokens, room):
        self.say()
        sinks = tokens[: policy.sinks]
        return sinks + upstream(tokens[policy.sinks :], room - len(sinks))

    def keeps(self, policy):
        return f"{policy.sinks} sinks of made-up rooms"

    def self_check(self, module):
        kept = self.sites(module)[0].upstream
        return None if kept([1, 2, 3], 2) == [2, 3] else "it keeps others"

    def faults(self, module):
        return [] if 0 in module.kept([*range(9)], 6) else ["it drops the first token"]
