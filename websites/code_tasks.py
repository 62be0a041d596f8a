"""The code host's templates of tasks.

Their order, and the order of the random draws, must not change.
"""

from websites.code import LABELS, ME, PEOPLE, ROLES, STATES
from websites.templates import (
    SiteTemplates, at, click, exactly, impossible, page_holds, pick, says, shows, write,
)

CODE = "__GITLAB__"
TASKS = SiteTemplates("code")

# SQL condition: the newest twelve issues, which the first page of a list shows.
OPEN = "state='open' and number>102"


def any_project(db, where="1"):
    """A random project -> (id, path)."""
    return db.any(f"select id,path from project where {where} order by id")


def any_issue(db, where="1"):
    """A random issue -> (the project's id and path, number, title, assignee, author)."""
    return db.any(
        "select project.id,path,number,title,assignee,author "
        f"from issue join project on project.id=project where {where} order by 1, 3"
    )


def find_project(path, *parts):
    """The steps that lead to a project, and from there by these links."""
    links = [click("link", part) for part in parts]
    return [click("link", "Explore"), click("link", path), *links]


def find_issue(path, title):
    """The steps that lead to an issue."""
    return find_project(path, "Issues", title)


# ---- navigate ----


@TASKS.add("navigate", "Open the project {project}.")
def open_project(db, rng):
    _, path = any_project(db)
    return {"project": path}, at(f"{CODE}/{path}"), find_project(path)


@TASKS.add("navigate", "Show me the open issues of {project} with the label {label}.")
def labelled(db, rng):
    _, path = any_project(db)
    label = rng.choice(LABELS)
    check = at(f"{CODE}/{path}/-/issues?state=open&label_name={label}")
    return {"project": path, "label": label}, check, find_project(path, "Issues", label)


@TASKS.add("navigate", "Show me {what}.")
def own_lists(db, rng):
    reviews = f"/dashboard/merge_requests?reviewer={ME}"
    what, path, name = rng.choice([
        (
            "the open issues that are assigned to me", f"/dashboard/issues?assignee={ME}",
            "My issues",
        ),
        ("my profile", f"/users/{ME}", "Profile"),
        ("the merge requests that I am to review", reviews, "My reviews"),
        ("all projects", "/explore", "Explore"),
    ])
    return {"what": what}, at(CODE + path), [click("link", name)]


@TASKS.add("navigate", "Open the list of {part} of the project {project}.")
def parts(db, rng):
    _, path = any_project(db)
    part, end = rng.choice([
        ("Commits", "commits"), ("Contributors", "graphs"), ("Members", "members"),
        ("Merge requests", "merge_requests"),
    ])
    values = {"project": path, "part": part.lower()}
    return values, at(f"{CODE}/{path}/-/{end}"), find_project(path, part)


@TASKS.add("navigate", "Open the issue \"{title}\" of {project}.")
def open_issue(db, rng):
    _, path, number, title, *_ = any_issue(db, OPEN)
    check = at(f"{CODE}/{path}/-/issues/{number}")
    return {"title": title, "project": path}, check, find_issue(path, title)


# ---- find ----


@TASKS.add("find", "How many open issues does the project {project} have? Answer with the number.")
def open_count(db, rng):
    project, path = any_project(db)
    count = db.value("select count(*) from issue where project=? and state='open'", project)
    return {"project": path}, exactly(count), find_project(path, "Issues"), count


@TASKS.add("find", "Who has made the most commits to {project}?")
def most_commits(db, rng):
    project, path = any_project(db)
    name = db.value(
        "select author from commits where project=? group by author order by count(*) desc",
        project)
    return {"project": path}, says(name), find_project(path, "Contributors"), name


@TASKS.add("find", "How many commits has {person} made to {project}? Answer with the number.")
def commits_of(db, rng):
    _, path, name, count = db.any(
        "select project,path,author,count(*) "
        "from commits join project on project.id=project "
        "group by project,author order by 1, 3")
    plan = find_project(path, "Contributors")
    return {"project": path, "person": name}, exactly(count), plan, count


@TASKS.add("find", "Who opened the issue \"{title}\" of {project}?")
def opened_by(db, rng):
    _, path, _, title, _, author = any_issue(db, OPEN)
    return {"title": title, "project": path}, says(author), find_issue(path, title), author


@TASKS.add("find", "Which project has the most stars?")
def most_stars(db, rng):
    path = db.value("select path from project order by stars desc")
    return {}, says(path), [click("link", "Explore"), click("link", "Most stars")], path


@TASKS.add("find", "What is the address for cloning {project}?")
def clone(db, rng):
    _, path = any_project(db)
    answer = f"git@codeyard.example:{path}.git"
    return {"project": path}, exactly(answer), find_project(path), answer


# ---- change ----


@TASKS.add("change", "Create an issue titled \"{title}\" with the label {label} in {project}.")
def create_issue(db, rng):
    project, path = any_project(db)
    number = db.value("select max(number)+1 from issue where project=?", project)
    label = rng.choice(LABELS)
    verb = rng.choice(["Add", "Remove", "Rename"])
    thing = rng.choice([
        "the splash screen", "the legacy mode", "the status line", "the sample data",
    ])
    title = f"{verb} {thing}"
    url = f"{CODE}/{path}/-/issues/{number}"
    check = shows((url, "main", [title]), (url, "#facts", [label, f"opened by {ME}"]))
    plan = [
        *find_project(path, "Issues", "New issue"), write("Title", title), pick(label),
        click("button", "Create issue"),
    ]
    return {"title": title, "label": label, "project": path}, check, plan


@TASKS.add("change", "Close the issue \"{title}\" of {project}.")
def close_issue(db, rng):
    _, path, number, title, *_ = any_issue(db, OPEN)
    check = shows((f"{CODE}/{path}/-/issues/{number}", "#facts", ["closed"]))
    plan = [*find_issue(path, title), click("button", "Close issue")]
    return {"title": title, "project": path}, check, plan


@TASKS.add("change", "Assign the issue \"{title}\" of {project} to {person}.")
def assign(db, rng):
    _, path, number, title, assignee, _ = any_issue(db, OPEN)
    name = rng.choice([person for person in PEOPLE if person != assignee])
    check = shows((f"{CODE}/{path}/-/issues/{number}", "#facts", [f"assigned to {name}"]))
    plan = [*find_issue(path, title), pick(name), click("button", "Save assignee")]
    return {"title": title, "project": path, "person": name}, check, plan


@TASKS.add("change", "Comment \"{text}\" on the issue \"{title}\" of {project}.")
def comment(db, rng):
    _, path, number, title, *_ = any_issue(db, OPEN)
    text = rng.choice(["I can take this on.", "Please send a log.", "Fixed on main, I think."])
    url = f"{CODE}/{path}/-/issues/{number}"
    check = shows((url, "#notes .note:last-child", [ME, text]))
    plan = [*find_issue(path, title), write("Comment", text), click("button", "Add comment")]
    return {"title": title, "project": path, "text": text}, check, plan


@TASKS.add("change", "{what} the merge request \"{title}\" of {project}.")
def finish(db, rng):
    path, number, title = db.any(
        "select path,number,title from mr join project on project.id=project "
        "where state='open' order by path, number")
    what, button_name, state = rng.choice([
        ("Merge", "Merge", "merged"),
        ("Close", "Close merge request", "closed"),
    ])
    check = shows((f"{CODE}/{path}/-/merge_requests/{number}", "#facts", [state]))
    plan = [
        *find_project(path, "Merge requests"), click("link", title), click("button", button_name),
    ]
    return {"what": what, "title": title, "project": path}, check, plan


@TASKS.add("change", "Give {project} a star.")
def star(db, rng):
    project, path = any_project(db)
    stars = db.value("select stars+1 from project where id=?", project)
    check = shows((f"{CODE}/{path}", "#stars", [str(stars)]))
    return {"project": path}, check, [*find_project(path), click("button", "Star")]


@TASKS.add("change", "Invite {person} to {project} as {role}.")
def invite(db, rng):
    project, path = any_project(db)
    members = {name for (name,) in db.rows("select name from access where project=?", project)}
    name = rng.choice([person for person in PEOPLE if person not in members])
    role = rng.choice(ROLES)
    row_of_name = (
        "[...document.querySelectorAll('#members tr')].map(r => r.innerText)"
        f".find(t => t.includes('{name}'))"
    )
    check = page_holds((f"{CODE}/{path}/-/members", row_of_name, [name, role]))
    plan = [*find_project(path, "Members"), pick(name), pick(role), click("button", "Invite")]
    return {"person": name, "role": role, "project": path}, check, plan


@TASKS.add("change", "Set my status to \"{status}\".")
def set_status(db, rng):
    status = rng.choice(STATES)
    check = shows((f"{CODE}/users/{ME}", "#status", [status]))
    plan = [click("link", "Profile"), pick(status), click("button", "Set status")]
    return {"status": status}, check, plan


# ---- impossible ----


@TASKS.add("impossible", "Who is assigned to issue #{number} of {project}?")
def no_issue(db, rng):
    _, path = any_project(db)
    values = {"project": path, "number": rng.randint(140, 190)}
    return values, impossible("There is no such issue."), find_project(path, "Issues"), "N/A"


@TASKS.add("impossible", "What is the license of {project}?")
def license_of(db, rng):
    _, path = any_project(db)
    return {"project": path}, impossible("The project does not say."), find_project(path), "N/A"
