"""What prints as text, and shows and saves itself as a page."""

import pathlib

from shardmap.explaining.draw.document import Document
from shardmap.explaining.draw.text import as_text


class Printed:
    """A document that prints; a notebook shows it as a page."""

    def _document(self) -> Document:
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self._document())

    def _repr_html_(self) -> str:
        # Imported here, as text does not need it.
        from shardmap.explaining.draw import html

        return html.element(self._document())

    def save(self, path: str | pathlib.Path) -> None:
        """Writes it as one HTML page, which needs no network.

        Args:
          path: the file to write.
        """
        from shardmap.explaining.draw import html

        text = html.page(self._document())
        pathlib.Path(path).write_text(text, encoding="utf-8")
