"""Metrics as a scraper reads them: as text, with the parser of the reference implementation."""

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import CollectorRegistry

from rallypoint.observe.metrics import exposition

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Scraped:
    """One scrape."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: Samples = {}
        for family in self.families.values():
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.samples, f"{key} appears twice"
                self.samples[key] = sample.value

    def __call__(self, name: str, **labels: str) -> float | None:
        """The value of a series, or None if there is no such series."""
        return self.samples.get((name, frozenset(labels.items())))

    def ours(self) -> set[str]:
        """The names of Rallypoint's metrics as they are defined: counters with `_total`."""
        return {
            name + "_total" * (family.type == "counter")
            for name, family in self.families.items()
            if name.startswith("rallypoint_")
        }


def scrape(registry: CollectorRegistry) -> Scraped:
    return Scraped(exposition(registry)[0].decode())
