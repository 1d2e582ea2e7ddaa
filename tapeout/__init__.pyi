from runtime.api import TextEngine as TextEngine
from runtime.api import generate as generate
from runtime.api import load as load
from runtime.wire.messages import SamplingSettings as SamplingSettings
from tapeout.errors import TapeoutError as TapeoutError

__version__: str
