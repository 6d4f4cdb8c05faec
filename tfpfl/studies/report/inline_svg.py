"""A matplotlib figure as an <svg> element for a page with several of them: letters are paths, ids are unique."""

import io
import re
from xml.etree import ElementTree as ET

import matplotlib

from tfpfl.checks import one_line

_DRAWN = re.compile(r"url\(#([^)]+)\)")


def inline_svg(figure, name: str, title: str) -> str:
    """The figure as an <svg> element.

    Args:
        figure: a matplotlib Figure.
        name: the beginning of all ids in the element; each figure of a page needs another name.
        title: what a screen reader reads aloud.

    Returns:
        HTML. The page decides about the size; the viewBox is in points.
    """
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):  # the same ids every time
        figure.savefig(file, format="svg", metadata={"Date": None})
    root = ET.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):  # a style element would hold for the whole page
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
    look = {"stroke-linejoin": "round", "stroke-linecap": "butt"}  # these two stood in the style element
    for key, value in {"viewBox": box, "role": "img", "aria-labelledby": f"{name}-title", **look}.items():
        root.set(key, value)
    told = ET.Element("title", {"id": f"{name}-title"})
    told.text = one_line(title)
    root.insert(0, told)
    return ET.tostring(root, encoding="unicode")


def _local(tag: str) -> str:
    """The name of a tag without its XML namespace, which HTML does not have."""
    return tag.rpartition("}")[2]
