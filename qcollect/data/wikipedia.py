"""Wikipedia: an XML dump -> its articles' wikitext -> plain text.

What stays of an article is what a reader reads: paragraphs, headings of sections that hold text, list items,
link texts, formulas (their LaTeX) and code. What goes: templates (but for the few that only dress a text, see
``_TEXT_TEMPLATES``), tables, references, files, galleries, categories, interlanguage links, comments.
"""

import html
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

from qcollect.errors import MissingExtraError

# Wikitext is parsed by namespaces' names. English ones work in every wiki; a dump names its own besides.
_MEDIA, _FILE, _CATEGORY = "-2", "6", "14"
ENGLISH_HIDDEN_NAMESPACES = frozenset({"media", "file", "image", "category"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Article:
    """One page of a dump: its wikitext, and the wiki's namespaces whose links show no text (lower case)."""

    title: str
    wikitext: str
    hidden_namespaces: frozenset[str]


def read_articles(stream: IO[bytes]) -> Iterator[Article]:
    """The articles of a MediaWiki export, in order: namespace 0, no redirects, model wikitext.

    Of several revisions of a page the last counts. Holds one page in memory at a time.

    Raises:
        xml.etree.ElementTree.ParseError: not well formed, or cut short.
    """
    hidden = set(ENGLISH_HIDDEN_NAMESPACES)
    root: ET.Element | None = None
    for event, element in ET.iterparse(stream, events=("start", "end")):
        name = _local(element)
        if event == "start":
            root = element if root is None else root
        elif name == "namespace":
            if element.get("key") in (_MEDIA, _FILE, _CATEGORY) and element.text:
                hidden.add(element.text.strip().lower())
        elif name == "page":
            article = _article(element, frozenset(hidden))
            if article is not None:
                yield article
            assert root is not None
            root.clear()


def require_parser() -> Any:
    """The module mwparserfromhell.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import mwparserfromhell
    except ImportError as error:
        raise MissingExtraError("mwparserfromhell", "data", "reading a Wikipedia XML dump") from error
    return mwparserfromhell


def plain_text(wikitext: str, hidden_namespaces: Iterable[str] = ENGLISH_HIDDEN_NAMESPACES) -> str:
    """The readable text of a page, paragraphs and headings apart by one blank line.

    "" if nothing is left, or if the parser gives up on the page.

    Args:
        wikitext: of one page.
        hidden_namespaces: lower-case names whose links show no text, as in ``[[File:x.png|thumb|caption]]``.

    Raises:
        MissingExtraError: mwparserfromhell is not installed.
    """
    parser = require_parser()
    try:
        code = parser.parse(_BEHAVIOUR_SWITCH.sub("", wikitext), skip_style_tags=True)
    except parser.parser.ParserError:
        return ""
    renderer = _Renderer(parser.nodes, frozenset(hidden_namespaces))
    return _drop_empty_sections(_tidy(renderer.render(code)))


# ---------------------------------------------------------------------------------------------
# The dump
# ---------------------------------------------------------------------------------------------


def _local(element: ET.Element) -> str:
    """The tag without its XML namespace, whose version differs from dump to dump."""
    return element.tag.rsplit("}", 1)[-1]


def _article(page: ET.Element, hidden: frozenset[str]) -> Article | None:
    fields = {_local(child): child for child in page}
    namespace = fields.get("ns")
    if "redirect" in fields or (namespace is not None and (namespace.text or "").strip() != "0"):
        return None
    revision = {_local(child): child for child in fields.get("revision", ())}
    model, text = revision.get("model"), revision.get("text")
    if text is None or not text.text or (model is not None and model.text != "wikitext"):
        return None
    title = fields.get("title")
    return Article(title=(title.text or "") if title is not None else "", wikitext=text.text, hidden_namespaces=hidden)


# ---------------------------------------------------------------------------------------------
# The wikitext
# ---------------------------------------------------------------------------------------------

_BEHAVIOUR_SWITCH = re.compile(r"__[A-Z]{3,}__")
_DROPPED_TAGS = frozenset(
    {"ref", "references", "table", "gallery", "timeline", "imagemap", "score", "hiero", "graph", "mapframe", "maplink"}
    | {
        "style",
        "script",
        "templatestyles",
        "templatedata",
        "includeonly",
        "inputbox",
        "categorytree",
        "indicator",
        "hr",
    }
)
_LITERAL_TAGS = frozenset({"math", "chem", "pre", "source", "syntaxhighlight", "nowiki"})
_BLOCK_TAGS = frozenset({"blockquote", "poem", "div", "p", "center", "ul", "ol", "li", "dl"})
_INTERLANGUAGE = re.compile(r"[a-z]{2,3}(-[a-z-]+)?:\S")


_HEADING = "\x02"  # stands before a heading's level and text until empty sections are known
_BLOCK = "\n\n"


class _Renderer:
    """Nodes of mwparserfromhell -> text. Text of wikitext holds no control characters; headings are marked with one."""

    def __init__(self, nodes: Any, hidden_namespaces: frozenset[str]) -> None:
        self._hidden = hidden_namespaces
        self._renderers: tuple[tuple[type, Callable[[Any], str]], ...] = (
            (nodes.Text, lambda node: str(node.value)),
            (nodes.Wikilink, self._link),
            (nodes.Template, self._template),
            (nodes.Tag, self._tag),
            (nodes.HTMLEntity, lambda node: str(node.normalize())),
            (nodes.Heading, lambda node: f"\n\n{_HEADING}{node.level}{self.render(node.title).strip()}\n\n"),
            (nodes.ExternalLink, self._external_link),
        )

    def render(self, code: Any) -> str:
        """Text of a piece of wikitext; nodes without a renderer (comments, arguments) have none."""
        return "".join(self._render_node(node) for node in code.nodes) if code is not None else ""

    def _render_node(self, node: Any) -> str:
        for kind, renderer in self._renderers:
            if isinstance(node, kind):
                return renderer(node)
        return ""

    def _link(self, node: Any) -> str:
        title = self.render(node.title).strip()
        namespace, colon, _ = title.partition(":")
        if colon and namespace.strip().lower() in self._hidden:
            return ""
        if node.text is not None:
            return self.render(node.text)
        return "" if _INTERLANGUAGE.match(title) else title.removeprefix(":")

    def _external_link(self, node: Any) -> str:
        if not node.brackets:
            return str(node.url)
        return self.render(node.title)  # a bare [url] shows as a number: no text

    def _tag(self, node: Any) -> str:
        name = str(node.tag).strip().lower()
        if node.wiki_markup in ("*", "#"):
            return "- "
        if name == "br":
            return "\n"
        if name in _DROPPED_TAGS or node.contents is None:
            return ""
        if name in _LITERAL_TAGS:
            return html.unescape(str(node.contents)).strip()
        text = self.render(node.contents)
        return f"{_BLOCK}{text}{_BLOCK}" if name in _BLOCK_TAGS else text

    def _template(self, node: Any) -> str:
        name = self.render(node.name).strip().lower().replace("_", " ")
        shown = _TEXT_TEMPLATES.get("lang-" if name.startswith("lang-") else name)
        if shown is None:
            return ""
        unnamed = {str(p.name).strip(): self.render(p.value).strip() for p in node.params}
        return shown([text for key, text in unnamed.items() if key.isdecimal()])


def _first(texts: list[str]) -> str:
    return texts[0] if texts else ""


def _last(texts: list[str]) -> str:
    return texts[-1] if texts else ""


def _second(texts: list[str]) -> str:
    return texts[1] if len(texts) > 1 else ""


def _quantity(texts: list[str]) -> str:
    """``{{convert|5|km|mi}}`` -> 5 km; ``{{convert|5|to|10|km}}`` -> 5 to 10 km."""
    return " ".join(texts[: 4 if _second(texts) in _RANGES else 2])


def _block_quote(texts: list[str]) -> str:
    return f"{_BLOCK}{_first(texts)}{_BLOCK}"


_RANGES = frozenset({"to", "and", "or", "by", "x", "-", "–", "+/-", "±"})

# Templates that stand for a part of their sentence: name -> its text, of the unnamed parameters.
_TEXT_TEMPLATES: dict[str, Callable[[list[str]], str]] = {
    **dict.fromkeys(("nowrap", "nobr", "smaller", "small", "big", "larger", "em", "strong", "vanchor"), _first),
    **dict.fromkeys(("math", "mvar", "var", "abbr", "lang-", "nihongo"), _first),
    **dict.fromkeys(("convert", "cvt"), _quantity),
    **dict.fromkeys(("transl", "transliteration"), _last),
    **dict.fromkeys(("quote", "blockquote", "cquote"), _block_quote),
    **dict.fromkeys(("chem", "chem2", "sup", "sub"), "".join),
    "lang": _second,
    "frac": "/".join,
    "angbr": lambda texts: f"⟨{_first(texts)}⟩",
    "as of": lambda texts: f"As of {_first(texts)}",
}

# ---------------------------------------------------------------------------------------------
# Tidying what the dropped parts leave
# ---------------------------------------------------------------------------------------------

_TIDY: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"'{2,5}", ""),  # italic and bold marks
        (r"[^\S\n]+", " "),
        (r" ?\n ?", "\n"),
        (r"\n{3,}", "\n\n"),
        (r"\(\s*(?:[,;:/–]\s*)+", "("),  # "( ; from Greek)"
        (r"(?:\s*[,;:/–])+\s*\)", ")"),
        (r" ?\( *\)", ""),
        (r" +([,.;:)])", r"\1"),
        (r"(?m)^ ?[:;*#]+ ?", ""),  # list marks inside tags and templates
        (r"(?m)^(?:- ?)+$", ""),  # items that held only dropped parts
        (r"(?m)^(?:- ){2,}", "- "),
        (r" *\n *", "\n"),
        (r"\n{3,}", "\n\n"),
    )
)


def _tidy(text: str) -> str:
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    return text.strip()


def _drop_empty_sections(text: str) -> str:
    """Without the headings that no text follows before the next heading of their level or above."""
    kept: list[str] = []
    waiting: list[tuple[int, str]] = []
    for block in text.split(_BLOCK):
        if block.startswith(_HEADING):
            level = int(block[1])
            waiting = [h for h in waiting if h[0] < level]
            waiting.append((level, block[2:]))
        elif block:
            kept += [title for _, title in waiting]
            kept.append(block)
            waiting = []
    return _BLOCK.join(kept)
