"""A matplotlib figure as an SVG in a page among others: letters as paths, ids of its own, nothing to load."""

import io
import re
from xml.etree import ElementTree as ET

import matplotlib

_DRAWN = re.compile(r"url\(#([^)]+)\)")


def inline_svg(figure, name: str, title: str) -> str:
    """The figure as an <svg> element.

    Args:
        figure: a matplotlib Figure.
        name: what all ids in it begin with; another for every figure of a page.
        title: what a screen reader says of it.

    Returns:
        HTML. Its size is left to the page; the viewBox is in points.
    """
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):  # the same ids every time
        figure.savefig(file, format="svg", metadata={"Date": None})
    root = ET.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):  # the style would be the whole page's
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        for key in list(element.attrib):
            value = _DRAWN.sub(rf"url(#{name}-\1)", element.attrib.pop(key))
            key = _local(key)
            if key == "id" or (key == "href" and value.startswith("#")):
                value = f"#{name}-{value[1:]}" if key == "href" else f"{name}-{value}"
            element.set(key, value)
    box = root.attrib["viewBox"]
    root.attrib.clear()
    look = {"stroke-linejoin": "round", "stroke-linecap": "butt"}  # what the style that was taken out said
    for key, value in {"viewBox": box, "role": "img", "aria-labelledby": f"{name}-title", **look}.items():
        root.set(key, value)
    told = ET.Element("title", {"id": f"{name}-title"})
    told.text = title
    root.insert(0, told)
    return ET.tostring(root, encoding="unicode")


def _local(tag: str) -> str:
    """Without the namespace, which HTML has none of."""
    return tag.rpartition("}")[2]
