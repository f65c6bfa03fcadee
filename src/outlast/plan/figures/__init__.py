"""The pictures of `outlast plan`: one file each, one style. They need matplotlib."""
