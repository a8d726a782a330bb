"""Finds what an answer quotes, names and counts in the documents that it is about.

checker = Checker(reading.documents)          # reused between answers
for check in checker.check(turn.answer):
    print(check.outcome, check.passage and check.passage.where)
"""

from kvchat.quotes.check import MISSING, REPAIRED, VERIFIED, Check, Checker, Passage, require_verified

__all__ = ["MISSING", "REPAIRED", "VERIFIED", "Check", "Checker", "Passage", "require_verified"]
