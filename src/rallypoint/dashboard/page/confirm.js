// The dialog in which an action is confirmed.

import { act } from "./api.js";
import { byId, say } from "./dom.js";

const WARNED = 409;

/**
 * Ask for confirmation and a reason, and act; resolves with the server's answer, or null on cancel. Stays open on errors.
 * After a warning of the server, the button acts all the same.
 */
export function confirmed(name, body, { title, text, button, isGrave }) {
  const dialog = byId("dialog");
  const form = byId("dialog-form");
  const yes = byId("dialog-yes");
  const why = byId("dialog-why");
  say(byId("dialog-title"), title);
  say(byId("dialog-text"), text);
  say(byId("dialog-wrong"), "");
  say(yes, button);
  let force = {};
  yes.classList.toggle("grave", isGrave);
  why.value = "";
  return new Promise((resolve) => {
    let isOver = false;
    const end = (said) => {
      if (isOver) return; // cancelled during the request: the dialog may show another action by now
      isOver = true;
      form.removeEventListener("submit", submit);
      byId("dialog-no").removeEventListener("click", no);
      dialog.removeEventListener("cancel", no);
      dialog.close();
      resolve(said);
    };
    const no = (event) => {
      event.preventDefault();
      end(null);
    };
    const submit = async (event) => {
      event.preventDefault();
      yes.disabled = true;
      try {
        const answer = await act(name, { ...body, ...force, why: why.value });
        end(answer.said);
      } catch (error) {
        if (isOver) return;
        say(byId("dialog-wrong"), error.message);
        if (error.status === WARNED) {
          force = { force: true };
          say(yes, `${button} anyway`);
        }
      } finally {
        yes.disabled = false;
      }
    };
    form.addEventListener("submit", submit);
    byId("dialog-no").addEventListener("click", no);
    dialog.addEventListener("cancel", no);
    dialog.showModal();
    why.focus();
  });
}
