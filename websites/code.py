"""Code hosting: projects with a readme, commits, members, issues and merge requests.

The user is devon, signed in.
"""

from websites.site import (
    Site, button, choose, esc, field, form, link, links, pager, table, top_bar, words,
)

ME = "devon"
WORDS = words("code")
LABELS = WORDS.labels
PEOPLE = WORDS.people
ROLES = ["Guest", "Reporter", "Developer", "Maintainer"]
STATES = ["Busy", "On holiday", "In a meeting", "Out sick"]  # of a person
MERGE_STATES = ["open", "merged", "closed"]  # of a merge request
SCHEMA = """
create table project(id integer primary key, path text, about text, stars int,
  mine int default 0);
create table issue(project int, number int, title text, label text, state text, author text,
  assignee text, date text);
create table mr(project int, number int, title text, source text, target text, state text,
  author text, reviewer text);
create table note(project int, kind text, number int, author text, body text);
create table commits(project int, hash text, title text, author text, date text);
create table access(project int, name text, role text);
create table person(name text primary key, status text default '')
"""
PAGE_SIZE = 12  # issues or commits on a page
NUM_PROJECTS = 8
# Numbers of three digits: no address of an issue or a merge request is the beginning of another's.
FIRST_ISSUE = 101
FIRST_MERGE_REQUEST = 201


# ---- the content of the tables; the order of the random draws must not change ----


def fill(db, rng):
    for name in (ME, *PEOPLE):
        db.execute("insert into person(name) values(?)", (name,))
    names = rng.sample(list(WORDS.projects), NUM_PROJECTS)
    stars = rng.sample(range(4, 700), NUM_PROJECTS)  # all different: sorting has one result
    for project, (name, count) in enumerate(zip(names, stars), 1):
        owner = ME if project < 4 else rng.choice(WORDS.other_owners)
        db.execute(
            "insert into project(id,path,about,stars) values(?,?,?,?)",
            (project, f"{owner}/{name}", WORDS.projects[name], count))
        all_titles = [title.format(part) for title in WORDS.titles for part in WORDS.parts]
        titles = rng.sample(all_titles, 22)
        _fill_issues(db, rng, project, titles[:14])
        _fill_merge_requests(db, rng, project, titles[14:20])
        _fill_commits(db, rng, project)
        for person in rng.sample(PEOPLE, 3):
            db.execute("insert into access values(?,?,?)", (project, person, rng.choice(ROLES)))


def _random_date(rng):
    return f"2025-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def _fill_issues(db, rng, project, titles):
    for number, title in enumerate(titles, FIRST_ISSUE):
        title = title[0].upper() + title[1:]
        label = rng.choice(LABELS)
        state = "closed" if rng.random() < 0.3 else "open"
        author = rng.choice(PEOPLE)
        assignee = rng.choice([ME, *PEOPLE, "", ""])
        db.execute(
            "insert into issue values(?,?,?,?,?,?,?,?)",
            (project, number, title, label, state, author, assignee, _random_date(rng)))
        for writer in rng.sample(PEOPLE, rng.choice([0, 0, 1, 2])):
            db.execute(
                "insert into note values(?,'issues',?,?,?)",
                (project, number, writer, rng.choice(WORDS.notes)))


def _fill_merge_requests(db, rng, project, titles):
    branches = rng.sample(WORDS.branches, len(titles))
    for number, (title, branch) in enumerate(zip(titles, branches), FIRST_MERGE_REQUEST):
        state = rng.choice(["open", "open", "merged", "closed"])
        author = rng.choice(PEOPLE)
        reviewer = rng.choice([ME, *PEOPLE])
        db.execute(
            "insert into mr values(?,?,?,?,?,?,?,?)",
            (project, number, "Resolve: " + title, branch, "main", state, author, reviewer))


def _fill_commits(db, rng, project):
    committers = rng.sample(PEOPLE, 4)
    counts = rng.sample(range(2, 14), 4)  # all different: one person has made the most commits
    authors = [name for name, count in zip(committers, counts) for _ in range(count)]
    rng.shuffle(authors)
    days = sorted((_random_date(rng) for _ in authors), reverse=True)
    for author, date in zip(authors, days):
        commit_hash = f"{rng.getrandbits(32):08x}"
        title = f"{rng.choice(['Fix', 'Improve', 'Rework', 'Test'])} {rng.choice(WORDS.parts)}"
        db.execute(
            "insert into commits values(?,?,?,?,?)", (project, commit_hash, title, author, date))


# ---- pieces of pages ----


def frame(request, title, body):
    status = request.value("select status from person where name=?", ME)
    signed_in = f"Signed in as {ME}"
    if status:
        signed_in += f": {esc(status)}"
    header = top_bar(
        request, "Codeyard", "Search projects", link("/explore", "Explore"),
        link("/dashboard/issues", "My issues", assignee=ME),
        link("/dashboard/merge_requests", "My reviews", reviewer=ME),
        link("/users/" + ME, "Profile"))
    return f'{header}<main>{body}<p class="muted">{signed_in}</p></main>'


SITE = Site("code", "Codeyard", SCHEMA, fill, frame)
PROJECT = r"/(?!users/|dashboard/)([\w.-]+/[\w.-]+)"  # the path of a project's page


def project_boxes(request, where, *values, order="path"):
    """The list of the projects that meet the SQL condition `where`."""
    projects = request.rows(
        "select path,about,stars+mine,"
        "(select count(*) from issue where project=project.id and state='open') "
        f"from project where {where} order by {order}",
        *values)
    if not projects:
        return "<p>None.</p>"
    return "".join(
        f'<div class="box">{link("/" + path, path)} <span class="tag">★ {stars}</span>'
        f'<p>{esc(about)}</p><p class="muted">{count} open issues</p></div>'
        for path, about, stars, count in projects
    )


def project_head(request, path):
    """-> (the project's id, the head of its pages). Raises NotFound for an unknown path."""
    project, about, stars, mine = request.row(
        "select id,about,stars+mine,mine from project where path=?", path)
    star_button = button(f"/{path}/-/star", "Unstar" if mine else "Star", kind="plain")
    parts = " ".join([
        link(f"/{path}", "Overview"),
        link(f"/{path}/-/issues?state=open", "Issues"),
        link(f"/{path}/-/merge_requests?state=open", "Merge requests"),
        link(f"/{path}/-/commits", "Commits"),
        link(f"/{path}/-/graphs", "Contributors"),
        link(f"/{path}/-/members", "Members"),
    ])
    return project, (
        f'<h1>{esc(path)}</h1><div>{esc(about)} <span class="tag" id="stars">★ {stars}</span> '
        f'{star_button}</div><p class="pager">{parts}</p>'
    )


def project_id(request, path):
    """The id of a project. Raises NotFound for an unknown path."""
    return request.value("select id from project where path=?", path)


def known(text, allowed, default):
    """`text` if it is one of the allowed ones, else `default`."""
    return text if text in allowed else default


def state_tag(state):
    """The state of an issue or a merge request as a coloured tag."""
    return f'<span class="tag {"good" if state == "open" else ""}">{state}</span>'


def issue_table(request, where, *values):
    """A table of the issues that meet the SQL condition `where`: the request's page of them."""
    issues = request.page_of(
        "select path,number,title,label,issue.state,assignee from issue "
        f"join project on project.id=project where {where} order by path, number desc",
        PAGE_SIZE, *values)
    rows = []
    for path, number, title, label, state, assignee in issues:
        title_link = link(f"/{path}/-/issues/{number}", title)
        rows.append([
            f'{title_link} <span class="muted">#{number}</span>',
            f'<span class="tag">{label}</span>',
            state_tag(state),
            esc(assignee),
        ])
    return table(["Issue", "Label", "State", "Assignee"], rows)


def merge_request_table(request, where, *values):
    """A table of all merge requests that meet the SQL condition `where`."""
    found = request.rows(
        "select path,number,title,source,target,mr.state,reviewer "
        f"from mr join project on project.id=project where {where} order by path, number desc",
        *values)
    rows = []
    for path, number, title, source, target, state, reviewer in found:
        title_link = link(f"/{path}/-/merge_requests/{number}", title)
        rows.append([
            f'{title_link} <span class="muted">!{number}</span>',
            esc(source),
            esc(target),
            state_tag(state),
            esc(reviewer),
        ])
    return table(["Merge request", "From", "Into", "State", "Reviewer"], rows)


def notes(request, project, kind, number, path):
    """The comments on an issue or a merge request, with the form for another one."""
    found = request.rows(
        "select author,body from note where project=? and kind=? and number=? order by rowid",
        project, kind, number)
    boxes = "".join(
        f'<div class="box note"><b>{esc(author)}</b><p>{esc(body)}</p></div>'
        for author, body in found)
    return (
        f'<div id="notes">{boxes}</div>' + form(
            f"/{path}/-/{kind}/{number}/note", "Add comment", field("body", "Comment", kind="area"))
    )


# ---- lists ----


@SITE.get("/")
def front(request):
    own_projects = project_boxes(request, "path like ?", ME + "/%")
    return "Your projects", f'<h1>Your projects</h1>{own_projects}'


@SITE.get("/explore")
def explore(request):
    order = "stars+mine desc" if request.query.get("sort") == "stars" else "path"
    return "Explore projects", (
        f'<h1>Explore projects</h1><p class="pager">{link("/explore", "By name")} '
        f'{link("/explore", "Most stars", sort="stars")}</p>'
        f'{project_boxes(request, "1", order=order)}'
    )


@SITE.get("/search")
def search(request):
    text = request.query.get("q", "")
    found = project_boxes(request, "instr(lower(path||about), lower(?))", text)
    return "Search", f'<h1>Projects: {esc(text)}</h1>{found}'


@SITE.get("/dashboard/issues")
def my_issues(request):
    who = request.query.get("assignee", ME)
    issues = issue_table(request, "assignee=? and issue.state=?", who, "open")
    return "Issues", f'<h1>Issues assigned to {esc(who)}</h1>{issues}'


@SITE.get("/dashboard/merge_requests")
def my_reviews(request):
    who = request.query.get("reviewer", ME)
    found = merge_request_table(request, "reviewer=? and mr.state=?", who, "open")
    return "Merge requests", f'<h1>Merge requests to be reviewed by {esc(who)}</h1>{found}'


# ---- a project ----


@SITE.get(PROJECT)
def overview(request, path):
    project, head = project_head(request, path)
    name = path.split("/")[1]
    commits = request.rows(
        "select title,author,date from commits where project=? order by date desc, rowid limit 4",
        project)
    rows = [[esc(title), esc(author), date] for title, author, date in commits]
    return path, (
        f'{head}<div class="box"><h2>Clone</h2>'
        f'<p id="clone">git@codeyard.example:{esc(path)}.git</p></div>'
        f'<div class="box"><h2>README</h2>'
        f'<p>{esc(name)} is easy to use: install it, run it, read the manual.</p></div>'
        f'<h2>Last commits</h2>{table(["Commit", "Author", "Date"], rows)}'
    )


@SITE.post(PROJECT + "/-/star")
def star(request, path):
    request.change("update project set mine=1-mine where path=?", path)
    return "/" + path


@SITE.get(PROJECT + "/-/commits")
def commits(request, path):
    project, head = project_head(request, path)
    count = request.value("select count(*) from commits where project=?", project)
    found = request.page_of(
        "select hash,title,author,date from commits where project=? order by date desc, rowid",
        PAGE_SIZE, project)
    rows = [[commit, esc(title), esc(author), date] for commit, title, author, date in found]
    return f"Commits of {path}", (
        f'{head}{table(["Hash", "Commit", "Author", "Date"], rows)}'
        f'{pager(request, count, PAGE_SIZE)}'
    )


@SITE.get(PROJECT + "/-/graphs")
def graphs(request, path):
    project, head = project_head(request, path)
    found = request.rows(
        "select author,count(*) from commits where project=? group by author order by 2 desc, 1",
        project)
    rows = [[esc(author), str(count)] for author, count in found]
    return f"Contributors of {path}", f'{head}{table(["Contributor", "Commits"], rows)}'


@SITE.get(PROJECT + "/-/members")
def members(request, path):
    project, head = project_head(request, path)
    found = request.rows("select name,role from access where project=? order by name", project)
    rows = [[esc(name), role] for name, role in found]
    return f"Members of {path}", (
        f'{head}<div id="members">{table(["Member", "Role"], rows)}</div>'
        '<h2>Invite somebody</h2>' + form(
            f"/{path}/-/members", "Invite", choose("name", "Person", PEOPLE),
            choose("role", "Role", ROLES))
    )


@SITE.post(PROJECT + "/-/members")
def invite(request, path):
    project = project_id(request, path)
    name = request.text("name")
    if name in PEOPLE:
        role = known(request.text("role"), ROLES, "Guest")
        request.change("delete from access where project=? and name=?", project, name)
        request.change("insert into access values(?,?,?)", project, name, role)
    return f"/{path}/-/members"


# ---- issues ----


@SITE.get(PROJECT + "/-/issues")
def issues(request, path):
    project, head = project_head(request, path)

    # The SQL condition of the filters in the query.
    where = "project=?"
    values = [project]
    for key, column in (("state", "issue.state"), ("label_name", "label")):
        if request.query.get(key):
            where += f" and {column}=?"
            values.append(request.query[key])
    count = request.value(f"select count(*) from issue where {where}", *values)

    # A link to a label keeps the state.
    keep = {"state": request.query["state"]} if "state" in request.query else {}
    labels = " ".join(link(request.path, label, **keep, label_name=label) for label in LABELS)
    states = links(request.path, "state", {"Open issues": "open", "Closed issues": "closed"})
    return f"Issues of {path}", (
        f'{head}<p class="pager">{states} {link(f"/{path}/-/issues/new", "New issue")}</p>'
        f'<p class="pager"><span>Label:</span> {labels}</p><p>{count} issues</p>'
        f'{issue_table(request, where, *values)}{pager(request, count, PAGE_SIZE)}'
    )


ASSIGNEES = [("", "nobody"), ME, *PEOPLE]  # options of a list


@SITE.get(PROJECT + "/-/issues/new")
def issue_form(request, path):
    _, head = project_head(request, path)
    return "New issue", f"{head}<h2>New issue</h2>" + form(
        f"/{path}/-/issues/new", "Create issue", field("title", "Title"),
        choose("label", "Label", LABELS), choose("assignee", "Assignee", ASSIGNEES))


@SITE.post(PROJECT + "/-/issues/new")
def issue_new(request, path):
    project = project_id(request, path)
    title = request.text("title", 200)
    if not title:
        return f"/{path}/-/issues/new"
    number = request.value("select coalesce(max(number),0)+1 from issue where project=?", project)
    label = known(request.text("label"), LABELS, "bug")
    assignee = known(request.text("assignee"), [ME, *PEOPLE], "")
    request.change("insert into issue values(?,?,?,?,'open',?,?,'2026-01-05')",
                   project, number, title, label, ME, assignee)
    return f"/{path}/-/issues/{number}"


@SITE.get(PROJECT + r"/-/issues/(\d{1,9})")
def issue(request, path, number):
    project, head = project_head(request, path)
    number, title, label, state, author, assignee, date = request.row(
        "select number,title,label,state,author,assignee,date from issue "
        "where project=? and number=?",
        project, int(number))
    here = f"/{path}/-/issues/{number}"
    text, kind = ("Close issue", "danger") if state == "open" else ("Reopen issue", "plain")
    toggle_button = button(f"{here}/toggle", text, kind=kind)
    assign_form = form(f"{here}/assign", "Save assignee",
                       choose("assignee", "Assignee", ASSIGNEES, assignee))
    return title, (
        f'{head}<div class="cols"><div><h2>{esc(title)} <span class="muted">#{number}</span></h2>'
        f'<div id="facts"><p>{state_tag(state)}<span class="tag">{label}</span></p>'
        f'<p class="muted">opened by {esc(author)} on {date}, '
        f'assigned to {esc(assignee) or "nobody"}</p></div>'
        f'{toggle_button}{notes(request, project, "issues", number, path)}</div>'
        f'<div class="box">{assign_form}</div></div>'
    )


@SITE.post(PROJECT + r"/-/issues/(\d{1,9})/(toggle|assign)")
def issue_change(request, path, number, what):
    project = project_id(request, path)
    if what == "toggle":
        request.change(
            "update issue set state=case state when 'open' then 'closed' else 'open' end "
            "where project=? and number=?",
            project, int(number))
    else:
        assignee = known(request.text("assignee"), [ME, *PEOPLE], "")
        request.change("update issue set assignee=? where project=? and number=?",
                       assignee, project, int(number))
    return f"/{path}/-/issues/{int(number)}"


@SITE.post(PROJECT + r"/-/(issues|merge_requests)/(\d{1,9})/note")
def note(request, path, kind, number):
    project = project_id(request, path)
    text = request.text("body")
    if text:
        request.change("insert into note values(?,?,?,?,?)", project, kind, int(number), ME, text)
    return f"/{path}/-/{kind}/{int(number)}"


# ---- merge requests ----


@SITE.get(PROJECT + "/-/merge_requests")
def merge_requests(request, path):
    project, head = project_head(request, path)
    state = known(request.query.get("state", ""), MERGE_STATES, "open")
    states = links(request.path, "state",
                   {f"{state.capitalize()} requests": state for state in MERGE_STATES})
    return f"Merge requests of {path}", (
        f'{head}<p class="pager">{states}</p>'
        f'{merge_request_table(request, "project=? and mr.state=?", project, state)}'
    )


@SITE.get(PROJECT + r"/-/merge_requests/(\d{1,9})")
def merge_request(request, path, number):
    project, head = project_head(request, path)
    number, title, source, target, state, author, reviewer = request.row(
        "select number,title,source,target,state,author,reviewer from mr "
        "where project=? and number=?",
        project, int(number))
    buttons = ""
    if state == "open":
        here = f"/{path}/-/merge_requests/{number}"
        buttons = button(f"{here}/merge", "Merge")
        buttons += button(f"{here}/close", "Close merge request", kind="danger")
    return title, (
        f'{head}<h2>{esc(title)} <span class="muted">!{number}</span></h2>'
        f'<div id="facts"><p>{state_tag(state)}</p>'
        f'<p>{esc(author)} wants to merge {esc(source)} into {esc(target)}</p>'
        f'<p class="muted">Reviewer: {esc(reviewer)}</p></div>'
        f'{buttons}{notes(request, project, "merge_requests", number, path)}'
    )


@SITE.post(PROJECT + r"/-/merge_requests/(\d{1,9})/(merge|close)")
def merge_request_change(request, path, number, what):
    project = project_id(request, path)
    state = "merged" if what == "merge" else "closed"
    request.change("update mr set state=? where project=? and number=? and state='open'",
                   state, project, int(number))
    return f"/{path}/-/merge_requests/{int(number)}"


# ---- people ----


@SITE.get(r"/users/([\w.]+)")
def profile(request, name):
    status = request.value("select status from person where name=?", name)
    status_form = ""
    if name == ME:
        options = [("", "none"), *STATES]
        status_form = form(
            "/users/status", "Set status", choose("status", "Status", options, status))
    return name, (
        f'<h1>{esc(name)}</h1><p id="status">{esc(status) or "no status"}</p>{status_form}'
        f'<h2>Projects</h2>{project_boxes(request, "path like ?", name + "/%")}'
    )


@SITE.post("/users/status")
def set_status(request):
    status = known(request.text("status"), STATES, "")
    request.change("update person set status=? where name=?", status, ME)
    return "/users/" + ME
