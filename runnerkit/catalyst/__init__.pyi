from runnerkit import data as data
from runnerkit import metrics as metrics
from runnerkit import utils as utils
from runnerkit.catalyst import contrib as contrib
from runnerkit.catalyst import dl as dl
from runnerkit.catalyst import registry as registry
from runnerkit.catalyst import settings as settings
