// The login form.

import { login } from "./api.js";
import { h, say } from "./dom.js";

export function loginView(done) {
  const wrong = h("p", { class: "wrong", role: "alert" });
  const field = h("input", {
    id: "token", type: "password", name: "token", autocomplete: "current-password", required: true, "aria-describedby": "token-help",
  });
  const button = h("button", { type: "submit", class: "strong" }, "Log in");
  const submit = async (event) => {
    event.preventDefault();
    button.disabled = true;
    say(wrong, "");
    try {
      await login(field.value);
      done();
    } catch (error) {
      say(wrong, error.message);
      field.select();
    } finally {
      button.disabled = false;
    }
  };
  return h(
    "form", { class: "card login", onsubmit: submit },
    h("h1", {}, "Log in"),
    h("p", { id: "token-help", class: "faint" }, "This server asks for its token: what is in the file that it was started with (--token-file)."),
    h("label", { for: "token" }, "Token"),
    field, wrong, h("div", { class: "buttons" }, button),
  );
}
