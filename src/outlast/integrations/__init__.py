"""Data sets of other libraries in splits that any rank can read: a file each, and none of these
libraries is imported before a data set of it is made."""

from outlast.integrations.hugging_face_splits import HuggingFaceSplits as HuggingFaceSplits
from outlast.integrations.mosaic_splits import MosaicSplits as MosaicSplits
from outlast.integrations.webdataset_splits import WebDatasetSplits as WebDatasetSplits
