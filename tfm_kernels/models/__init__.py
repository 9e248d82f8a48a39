"""Whole models built from tfm_kernels.nn: translation, classification, masked and causal language models."""

from .causal_language import CausalLanguageConfig as CausalLanguageConfig
from .causal_language import CausalLanguageModel as CausalLanguageModel
from .classification import ClassifierConfig as ClassifierConfig
from .classification import TransformerClassifier as TransformerClassifier
from .masked_language import MaskedLanguageConfig as MaskedLanguageConfig
from .masked_language import MaskedLanguageModel as MaskedLanguageModel
from .translation import TranslationConfig as TranslationConfig
from .translation import TranslationTransformer as TranslationTransformer
