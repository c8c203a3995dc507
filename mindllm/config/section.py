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
# Behind a PlainValidator: pydantic writes such a value twice, and takes the list that JSON made of a tuple for a wrong type.
WRITTEN_AS_IT_IS = PlainSerializer(lambda value: value, return_type=Any)


class StrictModel(BaseModel):
    """Data of a file that is no run: an unknown key is an error, and nothing changes it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Section(BaseModel):
    """A mapping of the YAML. Types are taken strictly: ``"4"`` is not an integer and ``1`` is not a boolean."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _empty_section(cls, data: Any) -> Any:
        return {} if data is None else data  # `processor:` with every line below it commented out
