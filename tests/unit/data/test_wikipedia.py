"""A dump's articles and the text a reader sees of them."""

import io

import pytest

from qcollect.data.wikipedia import plain_text, read_articles

pytest.importorskip("mwparserfromhell")


def page(title: str, text: str, *, namespace: int = 0, extra: str = "", model: str = "wikitext") -> str:
    return (
        f"<page><title>{title}</title><ns>{namespace}</ns><id>1</id>{extra}<revision><id>2</id>"
        f'<model>{model}</model><text xml:space="preserve">{text}</text></revision></page>'
    )


def dump(*pages: str, version: str = "0.11") -> bytes:
    xmlns = f"http://www.mediawiki.org/xml/export-{version}/"
    names = '<namespace key="6">Файл</namespace><namespace key="14">Категория</namespace>'
    head = f'<mediawiki xmlns="{xmlns}"><siteinfo><namespaces>{names}</namespaces></siteinfo>'
    return (head + "".join(pages) + "</mediawiki>").encode()


@pytest.mark.parametrize("version", ["0.3", "0.10", "0.11"])
def test_articles_are_read_whatever_the_dumps_schema_version(version: str) -> None:
    articles = list(read_articles(io.BytesIO(dump(page("A", "one"), page("B", "two"), version=version))))
    assert [(a.title, a.wikitext) for a in articles] == [("A", "one"), ("B", "two")]


def test_talk_pages_redirects_and_other_content_models_are_no_articles() -> None:
    pages = (
        page("Talk:A", "chat", namespace=1),
        page("B", "#REDIRECT [[C]]", extra='<redirect title="C" />'),
        page("C.js", "alert()", model="javascript"),
        page("Empty", ""),
        page("D", "text"),
    )
    assert [a.title for a in read_articles(io.BytesIO(dump(*pages)))] == ["D"]


def test_the_last_revision_of_a_page_counts() -> None:
    both = page("A", "old").replace("</page>", "<revision><text>new</text></revision></page>")
    assert [a.wikitext for a in read_articles(io.BytesIO(dump(both)))] == ["new"]


def test_links_to_files_and_categories_show_no_text_in_the_wikis_own_words_either() -> None:
    (article,) = read_articles(io.BytesIO(dump(page("A", "х [[Файл:a.png|thumb|надпис]][[Категория:Б]][[File:b]]у"))))
    assert plain_text(article.wikitext, article.hidden_namespaces) == "х у"


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("'''Bold''' and ''italic'' and '''''both'''''", "Bold and italic and both"),
        ("a [[link]], a [[Page (x)|piped]]s, [[:Category:Shown]]", "a link, a pipeds, Category:Shown"),
        ("end.<ref name=x>{{cite|book}}</ref><ref name=x /> Next", "end. Next"),
        ("see [http://a.b the site] or [http://a.b] or http://c.d", "see the site or or http://c.d"),
        ("x{{Infobox|a={{b}}}}y<!-- note -->z __NOTOC__", "xyz"),
        ("before\n{| class=wikitable\n| cell\n|}\nafter", "before\n\nafter"),
        ("[[File:a.png|thumb|A [[link]] in a caption]]Text [[Re:Zero]] [[fr:Texte]]", "Text Re:Zero"),
        ("fish &amp; chips&nbsp;&lt;b&gt;", "fish & chips <b>"),
        ("H<sub>2</sub>O is <math>a &lt; b^2</math> <code>x[[1]]</code>", "H2O is a < b^2 x1"),
        ("one<br />two", "one\ntwo"),
        ("* a\n** b\n# c\n: d\n; e", "- a\n- b\n- c\nd\ne"),
        ("Greek ({{IPA|x}}; from {{lang|el|ἀναρχία}}) and ({{IPA|x}}) end", "Greek (from ἀναρχία) and end"),
        ("{{convert|5|km|mi}}, {{cvt|5|to|10|km}} {{as of|2014}}", "5 km, 5 to 10 km As of 2014"),
        ("{{lang-el|λόγος}} {{nowrap|a b}} {{chem|H|2|O}} {{math|1=x = 1}}", "λόγος a b H2O x = 1"),
        ("a\n\n\n\n{{x}}\n\nb", "a\n\nb"),
        ("it's 5'' long", "it's 5 long"),
    ],
)
def test_what_a_reader_sees_is_kept(wikitext: str, text: str) -> None:
    assert plain_text(wikitext) == text


def test_headings_stay_where_text_follows() -> None:
    wikitext = "lead\n== A ==\n=== B ===\nbody\n=== C ===\n{{x}}\n== References ==\n{{reflist}}\n"
    assert plain_text(wikitext) == "lead\n\nA\n\nB\n\nbody"


@pytest.mark.parametrize("wikitext", ["", "{{disambiguation}}", "[[Category:X]]", "== See also ==\n{{portal}}"])
def test_a_page_without_readable_text_is_empty(wikitext: str) -> None:
    assert plain_text(wikitext) == ""


@pytest.mark.parametrize("wikitext", ["{{a|[[b", "{| x\n| y", "<ref>open", "]]}}|}", "[[" * 200, "{{" * 200])
def test_unbalanced_markup_loses_no_run(wikitext: str) -> None:
    assert plain_text(f"text {wikitext}").startswith("text")
