"""Personas: a chat in a manner of answering, and the present manner under a name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvchat.chat.commands import Load
from kvchat.chat.conversation import Conversation
from kvchat.engine.errors import SettingError
from kvchat.settings import SAMPLING_RULES, Persona
from kvchat.tui.modals.line_editor import LineEditor
from kvchat.tui.modals.persona_picker import PersonaPicker
from kvchat.tui.presets import BUILT_IN, MODELS_OWN, load_presets

if TYPE_CHECKING:
    from kvchat.models.load import LanguageModel
    from kvchat.tui.main_screen import MainScreen


class Personas:
    """Begins chats with personas, and saves them.

    Args:
        screen: has the chats, the sliders and the settings.
    """

    def __init__(self, screen: MainScreen) -> None:
        self.screen = screen
        self._awaits_model: Persona | None = None

    async def choose(self) -> None:
        """Let the user choose a persona, and begin a chat with it."""
        app = self.screen.app
        personas = app.settings.personas
        key = app.keymap.first("chat.save-persona")
        none = f"There are no personas yet. {key} saves the present settings as one."
        name = await app.push_screen_wait(PersonaPicker(list(personas.values()), none))
        if name is not None:
            self._begin(personas[name])

    def _begin(self, persona: Persona) -> None:
        screen, session = self.screen, self.screen.feed.session
        system = screen.app.settings.system if persona.system is None else persona.system
        screen.chats.new(Conversation(system=system or ""))
        if session is None or (persona.model and persona.model != session.llm.name):
            self._awaits_model = persona
            model = persona.model or screen.app.settings.model
            screen.submit(Load(model, screen.app.settings.load_arguments()))
        else:
            self._set_sliders(persona, session.llm)

    def model_loaded(self, llm: LanguageModel) -> None:
        """Set the sliders of a persona that waited for its model."""
        persona, self._awaits_model = self._awaits_model, None
        if persona is not None:
            self._set_sliders(persona, llm)

    def _set_sliders(self, persona: Persona, llm: LanguageModel) -> None:
        screen = self.screen
        try:
            params = llm.defaults
            if persona.preset and persona.preset != MODELS_OWN:
                presets = {each.name: each for each in (*load_presets()[0], *BUILT_IN)}
                if persona.preset not in presets:
                    raise SettingError(f"there is no preset '{persona.preset}'")
                params = presets[persona.preset].applied(params)
            params = params.updated(**persona.sampling)
        except SettingError as error:
            text = f"Persona '{persona.name}': {error}"
            screen.notify(text, severity="error", timeout=10, markup=False)
            return
        screen.sampling.params = params
        if screen.app.worker is not None:
            screen.app.worker.params = params

    async def save(self) -> None:
        """Save model, system prompt and sliders as a persona, in the configuration file."""
        from kvchat.settings.personas import LONGEST_NAME, save_persona

        screen, session = self.screen, self.screen.feed.session
        if session is None:
            screen.notify("A persona has a model; load one first.", timeout=5)
            return
        app = screen.app

        def refuse(name: str) -> str:
            if not 0 < len(name) <= LONGEST_NAME:
                return f"A name has 1 to {LONGEST_NAME} characters."
            return "There is a persona of this name." if name in app.settings.personas else ""

        editor = LineEditor(
            title="Save as a persona",
            note="Its model, system prompt and sliders are those of the chat in view.",
            placeholder="name",
            refuse=refuse,
        )
        name = await app.push_screen_wait(editor)
        if name is None:
            return
        params, defaults, preset = screen.sampling.params, session.llm.defaults, ""
        if screen.sampling.preset not in ("", MODELS_OWN):
            preset = screen.sampling.preset
            chosen = {each.name: each for each in (*load_presets()[0], *BUILT_IN)}.get(preset)
            defaults = chosen.applied(defaults) if chosen else defaults
        sampling = {
            each: getattr(params, each)
            for each in SAMPLING_RULES
            if getattr(params, each) not in (None, getattr(defaults, each))
        }
        try:
            persona = save_persona(
                name,
                model=session.llm.name,
                system=screen.pane.conversation.system,
                preset=preset or None,
                sampling=sampling,
            )
        except (ValueError, OSError) as error:
            screen.notify(str(error), severity="error", timeout=10, markup=False)
            return
        app.settings = replace(app.settings, personas={**app.settings.personas, name: persona})
        key = app.keymap.first("chat.personas")
        screen.notify(f"Saved as '{name}'; {key} begins a chat with it.", markup=False)
