"""Which indices and names a selector of a recipe means; pure.

Indices: a number, a list of numbers and ranges, or text of comma-separated terms:

    3           one index                     0-3         both ends included
    every:10    0, 10, 20, ...                spread:4    4 indices evenly over all, the first is 0
    all         all

Tokens: the same, taken in whole groups of ``TOKEN_GROUP`` (``expand_tokens``).

Names: shell globs (``*``, ``?``, ``[...]``), case-sensitive; a name itself always matches.
"""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from qcollect.errors import SelectionError

GRAMMAR = "an index (3), a range (0-3), every:N, spread:K, all, or a list of these"

# What every block size of the catalog divides: blocks that run along tokens stay whole.
TOKEN_GROUP = 64

_TERM = re.compile(
    r"(?P<index>\d+)|(?P<first>\d+)\s*-\s*(?P<last>\d+)|every:(?P<every>\d+)|spread:(?P<spread>\d+)|all", re.ASCII
)
_MAX_DIGITS = 18
_NUM_SHOWN = 8


def check_selector(selector: int | str | Sequence[int | str], *, key: str) -> None:
    """Whether ``selector`` is written right, for any number of indices.

    Raises:
        SelectionError: it is not; the message names what there is to write.
    """
    for term in _terms(selector, key):
        _match(term, selector, key)


def expand_indices(selector: int | str | Sequence[int | str], count: int, *, key: str = "selector") -> tuple[int, ...]:
    """The indices below ``count`` that ``selector`` means, ascending, each once.

    ``spread:K`` is ``i * count // K`` for i below K.

    Args:
        selector: see the module's docstring.
        count: how many indices there are, from 0.
        key: what the selector is called in messages.

    Raises:
        SelectionError: nonsense, or an index that does not exist; the message names those that do.
    """
    chosen: set[int] = set()
    for term in _terms(selector, key):
        chosen.update(_expand(term, count, selector, key))
    return tuple(sorted(chosen))


def expand_tokens(selector: int | str | Sequence[int | str], count: int, *, key: str = "selector") -> tuple[int, ...]:
    """The positions of a sequence of ``count`` tokens that ``selector`` means, in whole groups of ``TOKEN_GROUP``.

    ``every:N`` takes one group of N, ``spread:K`` as many as K tokens need, evenly; a token or a range the groups
    they lie in. The last group is the shorter where they do not come out even.

    Raises:
        SelectionError: as ``expand_indices``.
    """
    num_groups = -(-count // TOKEN_GROUP)
    groups: set[int] = set()
    for term in _terms(selector, key):
        expanded = _expand(term, count, selector, key)  # refuses what does not exist
        match = _match(term, selector, key)
        if match["every"]:
            groups.update(range(0, num_groups, int(match["every"])))
        elif match["spread"]:
            num = -(-int(match["spread"]) // TOKEN_GROUP)
            groups.update(i * num_groups // num for i in range(num))
        else:
            groups.update(token // TOKEN_GROUP for token in expanded)
    return tuple(t for g in sorted(groups) for t in range(g * TOKEN_GROUP, min((g + 1) * TOKEN_GROUP, count)))


def match_names(patterns: str | Iterable[str], names: Sequence[str], *, key: str = "selector") -> tuple[str, ...]:
    """Those of ``names``, in their order, that match at least one of ``patterns``.

    Raises:
        SelectionError: a pattern matches no name; the message names near ones.
    """
    wanted = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    if not wanted:
        raise SelectionError(f"{key} is an empty list and selects nothing; leave it out to select all")
    for pattern in wanted:
        if not any(_matches(pattern, name) for name in names):
            raise SelectionError(f"{key}: {pattern!r} matches nothing; {_alternatives(pattern, names)}")
    return tuple(name for name in names if any(_matches(pattern, name) for pattern in wanted))


def _terms(selector: int | str | Sequence[int | str], key: str) -> list[str]:
    if isinstance(selector, bool) or not isinstance(selector, int | str | list | tuple):
        raise SelectionError(f"{key} is {selector!r}; write {GRAMMAR}")
    if isinstance(selector, int):
        return [str(selector)]
    if isinstance(selector, str):
        return [term.strip() for term in selector.split(",")]
    if not selector:
        raise SelectionError(
            f"{key} is an empty list and selects nothing; leave it out for the default, or write {GRAMMAR}"
        )
    for item in selector:
        if isinstance(item, bool) or not isinstance(item, int | str):
            raise SelectionError(f"{key} is {_show(selector)}: {item!r} is not {GRAMMAR}")
    return [str(item).strip() for item in selector]


def _match(term: str, selector: int | str | Sequence[int | str], key: str) -> re.Match[str]:
    match = _TERM.fullmatch(term)
    wrong = SelectionError(f"{key} is {_show(selector)}: {term!r} is not {GRAMMAR}")
    if match is None or any(len(digits) > _MAX_DIGITS for digits in re.findall(r"\d+", term)):
        raise wrong
    if 0 in (int(match["every"] or 1), int(match["spread"] or 1)):
        raise SelectionError(f"{key} is {_show(selector)}: {term!r} needs a number of at least 1")
    if match["first"] and int(match["first"]) > int(match["last"]):
        raise SelectionError(
            f"{key} is {_show(selector)}: {term!r} runs backwards; write {match['last']}-{match['first']}"
        )
    return match


def _expand(term: str, count: int, selector: int | str | Sequence[int | str], key: str) -> Iterable[int]:
    match = _match(term, selector, key)
    there_are = f"there are {count} (0-{count - 1})" if count else "there are none"
    if match["spread"]:
        num = int(match["spread"])
        if num > count:
            raise SelectionError(f"{key} is {_show(selector)}: {num} indices are asked for, {there_are}")
        return [i * count // num for i in range(num)]
    if match["every"] or term == "all":
        if not count:
            raise SelectionError(f"{key} is {_show(selector)}: {there_are}")
        return range(0, count, int(match["every"] or 1))
    first, last = (int(match["first"] or match["index"]), int(match["last"] or match["index"]))
    if last >= count:
        missing = max(first, count)
        raise SelectionError(f"{key} is {_show(selector)}: index {missing} does not exist, {there_are}")
    return range(first, last + 1)


def _show(selector: int | str | Sequence[int | str]) -> str:
    if isinstance(selector, int | str):
        return repr(selector)
    shown = ", ".join(repr(item) for item in selector[:_NUM_SHOWN])
    return f"[{shown}{', ...' if len(selector) > _NUM_SHOWN else ''}]"


def _matches(pattern: str, name: str) -> bool:
    return name == pattern or fnmatchcase(name, pattern)


def _alternatives(pattern: str, names: Sequence[str]) -> str:
    if not names:
        return "there are no names to match"
    # a typo in the last part of a glob ('*.q_prj') is best answered by the glob with that part put right
    head, dot, leaf = pattern.rpartition(".")
    leaves = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    repaired = [f"{head}{dot}{near}" for near in get_close_matches(leaf.strip("*"), leaves, n=3, cutoff=0.6)]
    near = [glob for glob in repaired if any(_matches(glob, name) for name in names)]
    near += [name for name in get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.6) if name not in near]
    if near:
        return f"did you mean {' or '.join(repr(name) for name in near[:3])}?"
    shown = ", ".join(names[:_NUM_SHOWN])
    return f"there are: {shown}" + (f", ... ({len(names)} in all)" if len(names) > _NUM_SHOWN else "")
