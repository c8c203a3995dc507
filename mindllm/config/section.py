"""The base of every section (strict, frozen, unknown keys refused) and the value types that sections share."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, Strict, model_validator

Item = TypeVar("Item")

DType = Literal["float32", "float16", "bfloat16"]
PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# YAML gives lists, frozen sections keep tuples: the conversion is the only one that strict sections make.
List = Annotated[tuple[Item, ...], Strict(False)]
# For values with a PlainValidator: pydantic would serialize them twice and reject the list that JSON makes of a tuple.
UNCHANGED_SERIALIZER = PlainSerializer(lambda value: value, return_type=Any)


class StrictModel(BaseModel):
    """Data of a file other than a run. Unknown keys are errors, and values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Section(BaseModel):
    """A mapping of the YAML. Types are strict: ``"4"`` is not an integer and ``1`` is not a boolean."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _empty_section(cls, data: Any) -> Any:
        return {} if data is None else data  # `processor:` with every line below it commented out
