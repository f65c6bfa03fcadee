"""Report of a lake: sections, headlines and figures, as a page and as JSON."""
