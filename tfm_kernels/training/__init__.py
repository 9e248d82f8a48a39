"""Training of the four tasks: data, schedules, losses, mixed precision, checkpoints, one process or many."""

from .batches import Position as Position
from .batches import TokenBatches as TokenBatches
from .checkpoint import Checkpoints as Checkpoints
from .checkpoint import State as State
from .checkpoint import load_weights as load_weights
from .distributed import Processes as Processes
from .distributed import processes as processes
from .examples import LabelledExamples as LabelledExamples
from .examples import LineExamples as LineExamples
from .examples import MaskedExamples as MaskedExamples
from .examples import StreamExamples as StreamExamples
from .examples import TranslationExamples as TranslationExamples
from .loop import TrainingConfig as TrainingConfig
from .loop import evaluate as evaluate
from .loop import train as train
from .loss import cross_entropy as cross_entropy
from .masking import mask_tokens as mask_tokens
from .objective import Objective as Objective
from .optimizer import adamw as adamw
from .schedule import constant as constant
from .schedule import cosine as cosine
from .schedule import noam as noam
from .schedule import schedule as schedule
from .text_file import InputError as InputError
from .vocabulary import BytePairVocabulary as BytePairVocabulary
from .vocabulary import CharacterVocabulary as CharacterVocabulary
