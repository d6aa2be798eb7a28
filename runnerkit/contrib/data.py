"""Transforms of images and triplets for metric learning, in one namespace."""

from __future__ import annotations

from runnerkit.contrib.transforms import Compose as Compose
from runnerkit.contrib.transforms import ImageToTensor as ImageToTensor
from runnerkit.contrib.transforms import NormalizeImage as NormalizeImage
from runnerkit.data.triplets import AllTripletsSampler as AllTripletsSampler
from runnerkit.data.triplets import HardTripletsSampler as HardTripletsSampler
from runnerkit.data.triplets import ITripletSampler as ITripletSampler
